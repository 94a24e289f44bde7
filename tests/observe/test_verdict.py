"""The verdict looks at validation first, at signs of collapse and at warnings, and tells a change from its scatter."""

import pytest

from hwgrpo.observe.history import RunHistory
from hwgrpo.observe.verdict import Verdict, judge

CLIMB = [0.1, 0.12, 0.11, 0.2, 0.3, 0.5, 0.6, 0.62, 0.61, 0.63]

KL_CLAMP = 10.0


def history_of(rewards=(), before=None, after=None, **series) -> RunHistory:
    """Return a history: rewards per step, a validation before and one after, further metrics as lists per step."""
    history = RunHistory(largest_kl=KL_CLAMP)
    if before is not None:
        history.add(0, before)
    for step, reward in enumerate(rewards, start=1):
        history.add(step, {"reward": reward, **{name: values[step - 1] for name, values in series.items()}})
    if after is not None:
        history.add(len(rewards), after)
    return history


def of(*rewards: float, **changes) -> Verdict:
    return judge(history_of(rewards, **changes))


def validation(mean: float, stderr: float | None = 0.02, name: str = "quiz") -> dict[str, float]:
    values = {f"val-core/{name}/reward/mean@4": mean}
    return values | ({} if stderr is None else {f"val-aux/{name}/reward/mean@4/stderr": stderr})


def test_a_reward_that_climbs_rose_and_one_that_sinks_fell():
    assert (of(*CLIMB).word, of(*CLIMB).mood) == ("rose", "good")
    assert (of(*CLIMB[::-1]).word, of(*CLIMB[::-1]).mood) == ("fell", "bad")
    assert of(*CLIMB).headline == "Training reward rose from 0.166 to 0.592"


def test_ends_are_means_of_five_steps_or_of_half_of_a_short_run():
    assert of(*([0.0] * 5 + [9.0] * 10 + [1.0] * 5)).headline == "Training reward rose from 0.000 to 1.000"
    assert "first and the last 3 steps" in of(0, 0, 0, 5, 1, 1, 1).about


def test_a_difference_within_the_scatter_is_no_change():
    # means 0.5 and 0.56; standard error of their difference 0.11
    verdict = of(0.3, 0.7, 0.4, 0.6, 0.5, 0.36, 0.76, 0.46, 0.66, 0.56)
    assert (verdict.word, verdict.mood) == ("flat", "warn")
    assert verdict.headline == "No clear change in training reward: 0.500 to 0.560"


def test_equal_rewards_are_flat_though_they_scatter_not_at_all():
    assert of(*[0.1] * 10).word == "flat"
    assert of(*[0.0] * 10).word == "flat"
    assert of(*[0.1 + 0.2] * 5, *[0.3] * 5).word == "flat"


def test_five_steps_say_nothing_and_six_do():
    assert of(0, 0, 0, 1, 1).headline == "Too early to judge: 5 steps with a reward"
    assert of().headline == "No step has been logged yet"
    assert of(0, 0, 0, 1, 1).mood == "muted"
    assert of(0, 0, 0, 1, 1, 1).word == "rose"


def test_rewards_that_are_no_number_do_not_count():
    assert of(0, 0, 0, 1, 1, 1, float("nan")).headline == "Training reward rose from 0.000 to 1.000"


def test_validation_decides_where_it_was_measured_before_and_after():
    verdict = of(*CLIMB, before=validation(0.59), after=validation(0.41))
    assert (verdict.word, verdict.mood) == ("fell", "bad")
    assert verdict.headline == "Validation reward (quiz mean@4) fell from 0.590 to 0.410"
    assert "Training reward rose from 0.166 to 0.592" in verdict.about  # the gap is said: it is what reward hacking is


def test_validation_within_its_standard_error_is_no_change():
    assert of(*CLIMB, before=validation(0.50, 0.1), after=validation(0.70, 0.1)).word == "flat"
    assert of(*CLIMB, before=validation(0.50, 0.02), after=validation(0.70, 0.02)).word == "rose"


def test_validation_without_a_standard_error_changes_by_a_tenth_or_not_at_all():
    assert of(*CLIMB, before=validation(0.50, None), after=validation(0.52, None)).word == "flat"
    assert of(*CLIMB, before=validation(0.59, None), after=validation(0.0, None)).word == "fell"


def test_validation_that_was_never_repeated_leaves_the_decision_to_the_reward():
    assert of(*CLIMB, before=validation(0.5)).headline.startswith("Training reward rose")


def test_validation_that_is_no_number_leaves_the_decision_to_the_reward():
    assert of(*CLIMB, before=validation(0.5), after=validation(float("nan"))).headline.startswith(
        "Training reward rose"
    )


def test_sources_that_move_apart_are_mixed():
    before = validation(0.5, name="a") | validation(0.5, name="b")
    after = validation(0.9, name="a") | validation(0.3, name="b")
    verdict = of(*CLIMB, before=before, after=after)
    assert (verdict.word, verdict.mood) == ("mixed", "warn")
    assert verdict.headline == (
        "Validation reward rose and fell: a mean@4 from 0.500 to 0.900, b mean@4 from 0.500 to 0.300"
    )


def test_a_destroyed_run_is_said_to_have_collapsed_with_its_signs():
    verdict = of(
        *[0.0] * 10,
        before=validation(0.59),
        after=validation(0.0),
        kl=[0.1] * 5 + [0.99 * KL_CLAMP] * 5,
        **{"response_length/clip_ratio": [0.05] * 5 + [1.0] * 5},
    )
    assert (verdict.word, verdict.mood) == ("collapsed", "bad")
    assert verdict.headline == "The run collapsed: validation reward (quiz mean@4) fell from 0.590 to 0.000"
    assert f"KL to the reference is at its clamp ({0.99 * KL_CLAMP:.3g} of {KL_CLAMP:g})" in verdict.about
    assert "100% of the responses were truncated (5% at the start)" in verdict.about


def test_signs_of_collapse_are_enough_where_the_reward_stands_still():
    verdict = of(*[0.0] * 10, kl=[0.1] * 5 + [KL_CLAMP] * 5)
    assert (verdict.word, verdict.mood) == ("collapsed", "bad")
    assert verdict.headline == "The run collapsed: no clear change in training reward: 0.000 to 0.000"


def test_a_rise_with_a_sign_of_collapse_is_no_clean_success():
    verdict = of(*CLIMB, kl=[0.1] * 5 + [KL_CLAMP] * 5)
    assert (verdict.word, verdict.mood) == ("rose", "warn")
    assert "clamp" in verdict.about


def test_responses_that_were_truncated_from_the_start_are_no_collapse():
    assert of(*CLIMB, **{"response_length/clip_ratio": [1.0] * 10}).mood == "good"


@pytest.mark.parametrize(("best", "said"), [(0.95, True), (0.61, False)])
def test_the_best_validation_is_named_where_the_last_is_clearly_worse(best: float, said: bool):
    history = history_of(CLIMB, before=validation(0.3))
    history.add(6, validation(best))
    history.add(10, validation(0.6))
    verdict = judge(history)
    assert verdict.word == "rose"
    assert ("Its best was 0.950, after step 6" in verdict.about) is said


def test_warnings_are_counted_once_a_name_and_listed():
    verdict = judge(history_of(CLIMB), ["truncation", "KL exploding", "truncation"])
    assert "2 warnings: truncation, KL exploding." in verdict.about
    assert judge(history_of(CLIMB), ["truncation"]).about.endswith("1 warning: truncation.")
