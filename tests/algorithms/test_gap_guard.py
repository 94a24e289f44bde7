"""The guard of the gap: when a measure is applied and withdrawn, and that healthy gaps never cause one."""

import json
import math
import random
import re

import pytest

from hwgrpo.algorithms.gap_guard import (
    LOWER_AFTER,
    MASK_BOUNDS,
    RAISE_AFTER,
    THRESHOLDS,
    Gap,
    GuardState,
    advance,
    diagnose,
    in_force,
    measures,
    signs,
)
from hwgrpo.config.schema import CorrectionConfig
from tests.support.models.tiny import settings

NONE = CorrectionConfig()
STEPS = measures(NONE, max_staleness=0)
SOUND = {
    "rollout_corr/kl": 1e-3,
    "rollout_corr/k3_kl": 1e-3,
    "rollout_corr/log_ratio_slope": 0.0,
    "rollout_corr/log_ratio_r2": 0.0,
    "rollout_corr/chi2_token": 2e-3,
    "rollout_corr/rollout_is_eff_sample_size": 0.998,
    "training/rollout_probs_diff_mean": 0.005,
    "rollout_corr/log_ratio_max": 0.8,
}
"""A step of an engine in bf16."""


def step(**changes: float) -> dict[str, float]:
    """Return the metrics of a step; `kl=1` changes rollout_corr/kl."""
    full = {name.rpartition("/")[2]: name for name in SOUND}
    return SOUND | {full[name]: value for name, value in changes.items()}


def levels(series: list[dict[str, float]], steps=STEPS, state: GuardState | None = None) -> list[int]:
    """Return the level after each step."""
    state, found = state or GuardState(), []
    for number, metrics in enumerate(series, 1):
        state = advance(state, steps, number, metrics)
        found.append(state.level)
    return found


WEIGH, REJECT, STOP, MILD = step(kl=0.04), step(kl=0.25), step(kl=0.6), step(kl=0.02)
CALM = [SOUND] * LOWER_AFTER


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ([WEIGH] * 9, [0, 0, 1, 1, 1, 1, 1, 1, 1]),
        ([REJECT] * 9, [0, 0, 1, 1, 1, 2, 2, 2, 2]),
        ([STOP] * 9, [0, 0, 1, 1, 1, 2, 2, 2, 3]),
        ([step(kl=-0.25)] * 6, [0, 0, 1, 1, 1, 2]),
        ([WEIGH, WEIGH, SOUND] * 3, [0] * 9),
        ([WEIGH, WEIGH, {}, WEIGH], [0, 0, 0, 1]),
        ([step(kl=math.nan, rollout_probs_diff_mean=math.nan)] * 9, [0, 0, 1, 1, 1, 2, 2, 2, 3]),
    ],
    ids=["weigh", "reject", "stop", "negative", "interrupted", "nothing trained", "not a number"],
)
def test_a_level_is_raised_after_several_steps_in_a_row(series, expected):
    assert levels(series) == expected
    assert RAISE_AFTER == 3


@pytest.mark.parametrize(
    ("metric", "severities"),
    [
        ("rollout_corr/kl", ("weigh", "reject", "stop")),
        ("training/rollout_probs_diff_mean", ("weigh", "reject", "stop")),
        ("rollout_corr/chi2_token", ("weigh",)),
        ("rollout_corr/rollout_is_eff_sample_size", ("weigh", "reject")),
        ("rollout_corr/log_ratio_max", ("weigh",)),
    ],
)
def test_each_metric_of_the_table_counts_from_its_threshold_on(metric, severities):
    threshold = next(each for each in THRESHOLDS if each.metric == metric)
    sign = -1 if threshold.equal == 1 else 1
    for severity in ("weigh", "reject", "stop"):
        limit = getattr(threshold, severity)
        assert (limit is not None) == (severity in severities)
        if limit is not None:
            at = SOUND | {metric: threshold.equal + sign * limit * 0.999}
            beyond = SOUND | {metric: threshold.equal + sign * limit * 1.001}
            assert signs(at, severity) == []
            [text] = signs(beyond, severity)
            assert text.startswith(f"{metric} ")
            assert f"(limit {abs(threshold.equal - limit):.3g})" in text
    assert len(threshold.reason) > 20


def test_a_level_is_lowered_only_well_within_the_threshold_and_after_long():
    raised = [WEIGH] * 3
    assert levels(raised + [MILD] * 50)[-1] == 1, "within the threshold, but not well within"
    assert levels(raised + CALM)[-2:] == [1, 0]
    assert levels(raised + CALM[1:] + [MILD] + CALM[1:])[-1] == 1, "the count begins anew"
    two = [REJECT] * 6
    assert levels(two + CALM + CALM)[-1 - LOWER_AFTER :] == [1] * LOWER_AFTER + [0], "one level at a time"
    assert levels(two + [step(kl=0.09)] * 20)[-1] == 1, "calm for the mask, not for the weights"


def test_a_measure_that_has_to_be_applied_again_is_kept_longer():
    once = [WEIGH] * 3 + CALM
    series = once + [WEIGH] * 3 + CALM + CALM
    found = levels(series)
    assert found[len(once) + 2 :] == [1] * (2 * LOWER_AFTER) + [0]


def test_the_state_survives_json_at_every_step():
    draw = random.Random(0)
    state = GuardState()
    for number in range(1, 200):
        metrics = draw.choice([WEIGH, REJECT, SOUND, {}, step(kl=draw.random(), log_ratio_slope=draw.random())])
        state = advance(state, STEPS, number, metrics)
        again = GuardState.restored(json.loads(json.dumps(state.record())))
        assert again == state
    assert len(json.dumps(state.record())) < 3000


@pytest.mark.parametrize(
    ("correction", "max_staleness", "expected"),
    [
        (
            NONE,
            0,
            [
                "algorithm.correction.name=token_truncate, algorithm.correction.high=2.0",
                "algorithm.correction.name=token_mask, algorithm.correction.low=0.5, algorithm.correction.high=5.0",
                "",
            ],
        ),
        (
            CorrectionConfig(name="token_truncate", high=3.0),
            2,
            [
                "algorithm.correction.name=token_mask, algorithm.correction.high=3.0",
                "rollout.max_staleness=1",
                "rollout.max_staleness=0",
                "",
            ],
        ),
        (
            CorrectionConfig(name="sequence_truncate", low=0.1, high=4.0),
            0,
            [
                "algorithm.correction.name=sequence_mask, algorithm.correction.low=0.1, algorithm.correction.high=4.0",
                "",
            ],
        ),
        (CorrectionConfig(name="token_mask"), 1, ["rollout.max_staleness=0", ""]),
        (CorrectionConfig(name="sequence_mask"), 0, [""]),
        (CorrectionConfig(name="my.py:correction"), 0, [""]),
    ],
    ids=["none", "truncation, stale", "sequences", "mask, stale", "sequence mask", "own"],
)
def test_a_configured_correction_is_never_weakened(correction, max_staleness, expected):
    found = measures(correction, max_staleness)
    assert [measure.settings for measure in found] == expected
    for each in filter(None, expected):  # a user can set them
        stale = ["rollout.max_staleness=2", "algorithm.correction.name=token_truncate"] if "staleness" in each else []
        settings(*stale, *each.split(", "))
    assert found[-1].severity == "stop"
    for level in range(len(found)):
        applied, bound = in_force(found, level)
        if correction.name != "none" and applied is not None:
            assert applied.name.endswith("_mask")
            assert (applied.low, applied.high) == (correction.low, correction.high)
        assert bound is None or bound < max_staleness
    assert in_force(found, 0) == (None, None)


def test_later_measures_keep_the_correction_of_earlier_ones():
    found = measures(NONE, 1)
    assert [measure.severity for measure in found] == ["weigh", "reject", "reject", "stop"]
    correction, bound = in_force(found, 3)
    assert correction is not None
    assert (correction.name, (correction.low, correction.high), bound) == ("token_mask", MASK_BOUNDS, 0)


@pytest.mark.parametrize("seed", range(20))
def test_healthy_gaps_of_engines_in_bf16_never_raise_a_level(seed):
    """Log-ratios with the published spread and heavier tails, whose KL grows ninefold over the run."""
    draw = random.Random(seed)
    series = []
    for number in range(300):
        spread = 0.11 * (1 + 2 * number / 300) * draw.uniform(0.7, 1.3)
        lp = [-draw.expovariate(2) for _ in range(256)]
        # a likely token's log-prob cannot move much: its derivative by the logit is 1 - p
        lr = [(1 - math.exp(a)) * spread * draw.gauss(0, 1) * (4 if draw.random() < 0.01 else 1) for a in lp]
        ratio, n = [math.exp(each) for each in lr], len(lr)
        apart = [abs(math.exp(a + b) - math.exp(a)) for a, b in zip(lp, lr, strict=True)]
        series.append(
            step(
                kl=-sum(lr) / n,
                k3_kl=sum(r - 1 - each for r, each in zip(ratio, lr, strict=True)) / n,
                chi2_token=sum(r * r for r in ratio) / n - 1,
                rollout_is_eff_sample_size=sum(ratio) ** 2 / n / sum(r * r for r in ratio),
                rollout_probs_diff_mean=sum(apart) / n,
                log_ratio_max=max(map(abs, lr)),
            )
        )
    assert levels(series) == [0] * 300
    kl = [each["rollout_corr/k3_kl"] for each in series]
    assert 5e-4 < sum(kl[:50]) / 50 < 3e-3 < 6e-3 < sum(kl[-50:]) / 50, "the series is no idle one"


def test_the_first_gap_stays_known_and_the_history_short():
    state = GuardState()
    for number in range(1, 101):
        state = advance(state, STEPS, number, step(k3_kl=number))
    assert state.first is not None
    assert (state.first.step, state.recent[0].step, state.recent[-1].step) == (1, 81, 100)


# Which cause is named for which pattern of the gap, and how sure it is

CONFIG = settings()


def gaps_of(k3: list[float], slope: float = 0.0, r2: float = 0.05, start: int = 1) -> list[Gap]:
    return [Gap(start + i, value, slope, r2) for i, value in enumerate(k3)]


def noisy(level: float, n: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level * draw.uniform(0.5, 2) for _ in range(n)]


STALE = [1e-13, *(1e-3 * t * t for t in range(1, 15))]
CASES = {
    "never new weights": (gaps_of(STALE, 0.3, 0.6), "stale weights", "likely"),
    "never new weights, sharper": (gaps_of(STALE, 0.3, 0.9), "stale weights", "likely"),
    "stopped taking weights": (gaps_of([1e-13] * 8 + STALE[1:10]), "stale weights", "likely"),
    "grown, then steady": (gaps_of([1e-4, *noisy(0.2, 15)]), "stale weights", "possible"),
    "bf16": (gaps_of(noisy(2e-3, 15)), "lower precision of the engine", "possible"),
    "temperature": (gaps_of(noisy(0.08, 15), 0.4, 0.95), "another sampling temperature", "likely"),
    "lower temperature": (gaps_of(noisy(0.08, 15), -0.4, 0.95), "another sampling temperature", "likely"),
    "small temperature": (gaps_of(noisy(1e-3, 15), 0.05, 0.95), "another sampling temperature", "likely"),
    "damaged": (gaps_of(noisy(1.5, 5), -0.5, 0.3), "wrong or damaged weights in the engine", "likely"),
    "unrelated": (gaps_of(noisy(3.0, 5), -0.97, 0.85), "wrong or damaged weights in the engine", "likely"),
    "damaged later": (
        gaps_of([1e-13] * 9 + noisy(0.5, 6), -0.3, 0.3),
        "wrong or damaged weights in the engine",
        "likely",
    ),
    "slightly damaged later": (
        gaps_of([1e-13] * 9 + noisy(0.05, 6), -0.3, 0.3),
        "wrong or damaged weights in the engine",
        "possible",
    ),
    "another temperature later": (
        gaps_of([1e-4] * 9 + noisy(0.1, 6), 0.3, 0.95),
        "another sampling temperature",
        "likely",
    ),
    "not a number": (gaps_of([1e-3, math.nan, math.nan]), "log-probs that are not finite", "likely"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_of_each_pattern_is_named(case):
    gaps, name, certainty = CASES[case]
    cause = diagnose(gaps[0], gaps, CONFIG.rollout, CONFIG.optim)
    assert (cause.name, cause.certainty) == (name, certainty), cause.text


def test_configured_staleness_is_named_with_its_setting():
    config = settings("rollout.max_staleness=1", "algorithm.correction.name=token_truncate")
    gaps = gaps_of([1e-13, *noisy(0.2, 8)])
    cause = diagnose(gaps[0], gaps, config.rollout, config.optim)
    assert cause.name == "stale weights"
    assert "lower rollout.max_staleness (now 1)" in cause.remedy
    later = diagnose(gaps[0], gaps_of([1e-13, *noisy(1e-3, 6), *noisy(2.0, 4)]), config.rollout, config.optim)
    assert later.name == "wrong or damaged weights in the engine", "not from the second step on"


def test_a_temperature_is_estimated():
    gaps = gaps_of(noisy(0.1, 8), slope=-0.25, r2=0.97)
    assert "a temperature of about 0.75;" in diagnose(gaps[0], gaps, CONFIG.rollout, CONFIG.optim).evidence


def test_slopes_that_change_are_no_temperature():
    gaps = [Gap(i, 0.05, slope, 0.9) for i, slope in enumerate((0.1, 0.3, -0.2, 0.4), 1)]
    assert diagnose(gaps[0], gaps, CONFIG.rollout, CONFIG.optim).name == "lower precision of the engine"


@pytest.mark.parametrize("case", CASES)
def test_remedies_name_settings_that_there_are(case):
    gaps, _, _ = CASES[case]
    for config in (CONFIG, settings("rollout.max_staleness=2", "algorithm.correction.name=token_mask")):
        text = diagnose(gaps[0], gaps, config.rollout, config.optim).text
        named = re.findall(r"\b(?:rollout|optim|kernels|algorithm|model)\.[a-z_.]*[a-z_]", text)
        assert named, text
        for key in named:
            value = config
            for part in key.split("."):
                value = getattr(value, part)
