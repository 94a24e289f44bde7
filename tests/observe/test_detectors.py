"""Each sign of trouble, on sequences that have it and on near ones that do not; and on recorded healthy runs."""

import json
import math
import re
from pathlib import Path

import pytest

from hwgrpo.config import Config
from hwgrpo.config.document import entries
from hwgrpo.observe.detectors import DETECTORS, WATCHED, Finding
from hwgrpo.observe.series import MetricSeries, Series
from hwgrpo.observe.shown_fields import REWARD
from hwgrpo.observe.warnings import Monitor

RECORDED = Path(__file__).parent / "recorded"

HEALTHY = {
    "reward": 0.5,
    "critic/rewards/max": 1.0,
    "critic/rewards/min": 0.0,
    "frac_reward_zero_std": 0.2,
    "kl": 0.01,
    "response_length/clip_ratio": 0.0,
    "actor/entropy": 0.3,
    "response_length/mean": 100.0,
    "actor/grad_norm": 0.5,
    "training/rollout_probs_diff_mean": 1e-6,
}


def found(name: str, steps: list[dict], config: Config | None = None) -> Finding | None:
    """Return what a detector says after these steps; each states only what differs from HEALTHY."""
    series = MetricSeries(WATCHED)
    for step, changes in enumerate(steps, start=1):
        series.add(step, HEALTHY | changes)
    return DETECTORS[name](series, config or Config())


def wavering(mean: float, step: int, by: float = 0.03) -> float:
    """A reward with noise that is the same in every run of the test."""
    return mean + by * math.sin(12.9898 * step)


def rewards(means: list[float]) -> list[dict]:
    return [{"reward": wavering(mean, step)} for step, mean in enumerate(means)]


def rise(start: float, end: float, steps: int) -> list[float]:
    return [start + (end - start) * i / (steps - 1) for i in range(steps)]


def recorded(name: str) -> list[dict]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def warned(name: str, config: Config) -> list[tuple[int, str]]:
    monitor = Monitor(config)
    for values in recorded(name):
        monitor.add(values["step"], values)
    return [(warning.step, warning.name) for warning in monitor.warnings]


def test_a_run_that_learned_its_task_is_not_warned_of_at_any_step():
    assert len(recorded("tiny_sort")) == 100
    assert warned("tiny_sort", Config()) == []


def test_a_recorded_control_run_with_shuffled_rewards_is_told_to_be_flat_and_why():
    config = Config()
    config.reward.shuffle = True
    monitor = Monitor(config)
    for values in recorded("tiny_sort_shuffled"):
        monitor.add(values["step"], values)
    assert [(w.step, w.name) for w in monitor.warnings] == [(50, "reward flat"), (100, "reward flat")]
    assert "reward.shuffle=false" in monitor.warnings[0].text


CASES = {
    # name: (sequences that have the sign, near ones that have not)
    "reward flat": (
        [rewards([0.3] * 50), rewards(rise(0.4, 0.3, 60)), rewards([0.3] * 300)],
        [
            rewards([0.3] * 49),
            rewards(rise(0.3, 0.4, 60)),
            rewards(rise(0.3, 0.7, 10) + [0.7] * 90),
            rewards([0.97] * 60),
            [{"reward": 1.0, "critic/rewards/min": 1.0}] * 60,
        ],
    ),
    "reward falling": (
        [rewards(rise(0.3, 0.8, 60) + rise(0.8, 0.35, 60))],
        [
            rewards(rise(0.3, 0.8, 60) + [0.75] * 60),
            rewards([0.3] * 100),
            rewards(rise(0.3, 0.8, 120)),
            rewards(rise(0.30, 0.32, 60) + [0.30] * 60),
        ],
    ),
    "groups too easy": (
        [[{"reward": 0.99, "frac_reward_zero_std": 0.97}] * 10, [{"reward": 1.0, "critic/rewards/min": 1.0,
          "frac_reward_zero_std": 1.0}] * 10],
        [
            [{"reward": 0.99, "frac_reward_zero_std": 0.97}] * 9,
            [{"reward": 0.96, "frac_reward_zero_std": 0.89}] * 50,
            [{"reward": 0.01, "frac_reward_zero_std": 0.97}] * 10,
        ],
    ),
    "groups too hard": (
        [[{"reward": 0.01, "frac_reward_zero_std": 0.85}] * 10, [{"reward": 0.0, "critic/rewards/max": 0.0,
          "frac_reward_zero_std": 1.0}] * 10],
        [
            [{"reward": 0.05, "frac_reward_zero_std": 0.7}] * 50,
            [{"reward": 0.99, "frac_reward_zero_std": 0.97}] * 10,
            [{"reward": 1.0, "critic/rewards/min": 1.0, "frac_reward_zero_std": 1.0}] * 10,
        ],
    ),
    "groups equal": (
        [[{"reward": 0.5, "frac_reward_zero_std": 0.9}] * 10],
        [[{"reward": 0.5, "frac_reward_zero_std": 0.7}] * 50, [{"reward": 0.05, "frac_reward_zero_std": 0.9}] * 10],
    ),
    "KL exploding": (
        [[{"kl": 1.5}] * 5, [{"kl": 0.05}] * 20 + [{"kl": 0.4}] * 5],
        [
            [{"kl": 1.5}] * 4,
            [{"kl": 0.001}] * 20 + [{"kl": 0.2}] * 5,
            [{"kl": 0.3}] * 20 + [{"kl": 0.8}] * 5,
            [{"kl": None}] * 30,
            [{"kl": 0.05}] * 29 + [{"kl": 1.2}],
        ],
    ),
    "truncation": (
        [[{"response_length/clip_ratio": 0.35}] * 5],
        [
            [{"response_length/clip_ratio": 0.35}] * 4,
            [{"response_length/clip_ratio": 0.3}] * 30,
            [{"response_length/clip_ratio": 1.0}] + [{}] * 4,
        ],
    ),
    "entropy collapse": (
        [[{"actor/entropy": 0.3}] * 5 + [{"actor/entropy": 0.02}] * 5],
        [
            [{"actor/entropy": 0.3}] * 5 + [{"actor/entropy": 0.04}] * 5,
            [{"actor/entropy": 0.3}] * 5 + [{"actor/entropy": 0.02, "reward": 0.95}] * 5,
            [{"actor/entropy": 0.3}] * 5 + [{"actor/entropy": 0.02}] * 4,
            [{"actor/entropy": 0.02}] * 20,
        ],
    ),
    "rollout and trainer differ": (
        [[{"training/rollout_probs_diff_mean": 0.03}] * 5],
        [[{"training/rollout_probs_diff_mean": 0.019}] * 30, [{"training/rollout_probs_diff_mean": 0.03}] * 4],
    ),
    "gradient spike": (
        [[{}] * 20 + [{"actor/grad_norm": 5.5}]],
        [
            [{}] * 20 + [{"actor/grad_norm": 4.5}],
            [{}] * 19 + [{"actor/grad_norm": 5.5}],
            [{}] * 20 + [{"actor/grad_norm": 5.5}, {}],
            [{"actor/grad_norm": 0.0}] * 20 + [{"actor/grad_norm": 0.4}],
            [{"actor/grad_norm": 0.01}] * 19 + [{"actor/grad_norm": 0.4}] * 2,
        ],
    ),
    "gradient clipped": (
        [[{"actor/grad_norm": 4.0}] * 20],
        [
            [{"actor/grad_norm": 4.0}] * 19,
            [{"actor/grad_norm": 2.0}] * 20,
            [{"actor/grad_norm": 4.0}] * 19 + [{"actor/grad_norm": 0.9}],
        ],
    ),
    "length collapse": (
        [[{}] * 5 + [{"response_length/mean": 20.0}] * 5],
        [
            [{}] * 5 + [{"response_length/mean": 30.0}] * 5,
            [{"reward": 0.3}] * 5 + [{"response_length/mean": 20.0, "reward": 0.9}] * 40,
            [{}] * 5 + [{"response_length/mean": 20.0}] * 4,
        ],
    ),
}  # fmt: skip


def test_every_detector_has_cases():
    assert set(CASES) == set(DETECTORS)


@pytest.mark.parametrize(("name", "index"), [(n, i) for n, (signs, _) in CASES.items() for i in range(len(signs))])
def test_the_sign_is_seen(name: str, index: int):
    finding = found(name, CASES[name][0][index])
    assert finding is not None
    assert finding.severity >= 1
    assert re.search(r"\d", finding.seen), "it says what was seen in numbers"
    assert finding.meaning
    assert finding.remedies


@pytest.mark.parametrize(("name", "index"), [(n, i) for n, (_, near) in CASES.items() for i in range(len(near))])
def test_what_only_resembles_the_sign_is_passed_over(name: str, index: int):
    assert found(name, CASES[name][1][index]) is None


def a_control_run() -> Config:
    config = Config()
    config.reward.shuffle, config.algorithm.kl.coef, config.optim.grad_clip = True, 0.1, 1.0
    config.rollout.top_k, config.rollout.top_p, config.rollout.min_p = 5, 0.9, 0.1
    return config


@pytest.mark.parametrize("config", [Config(), a_control_run()])
def test_every_setting_that_advice_names_exists(config: Config):
    known = {entry.key.split("[]")[0] for entry in entries()}
    sections = {key.split(".")[0] for key in known}
    named = set()
    for name, (signs, _) in CASES.items():
        for steps in signs:
            finding = found(name, steps, config)
            assert finding is not None
            text = " ".join((finding.seen, *finding.remedies))
            named |= {word for word in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", text) if word.split(".")[0] in sections}
    assert named <= known
    assert len(named) > 10


@pytest.mark.parametrize("name", ["groups too easy", "groups too hard", "groups equal"])
@pytest.mark.parametrize("n", [1, 8])
def test_equal_groups_are_no_sign_where_advantages_do_not_compare_within_the_group(name: str, n: int):
    """Runs with rollout.n=1, whose groups are all equal, were advised to use a larger rollout.n."""
    config = Config()
    config.rollout.n, config.algorithm.advantage.name = n, "remax" if n > 1 else "grpo"
    assert found(name, CASES[name][0][0], config) is None


def test_advice_knows_the_settings_of_the_run():
    config = Config()
    config.optim.lr, config.optim.grad_clip = 3e-5, 0.5
    flat = found("reward flat", rewards([0.3] * 50), config)
    assert flat is not None
    assert "optim.lr (now 3e-05)" in flat.remedies[1]
    assert not any("kl.coef" in remedy for remedy in flat.remedies), "there is no KL term to lower"
    assert found("gradient clipped", [{"actor/grad_norm": 1.8}] * 20, config) is not None
    config.optim.grad_clip = 0.0
    assert found("gradient clipped", [{"actor/grad_norm": 1.8}] * 20, config) is None
    gap = CASES["rollout and trainer differ"][0][0]
    assert "top_k" not in str(found("rollout and trainer differ", gap, config))
    config.rollout.top_k = 5
    assert "top_k" not in str(found("rollout and trainer differ", gap, config)), "the trainer drops the same tokens"
    config.rollout.engine = "sglang_server"
    assert "switch off rollout.top_k (now 5)" in str(found("rollout and trainer differ", gap, config))


def test_a_number_that_is_missing_or_not_finite_is_no_step_of_its_series():
    series = MetricSeries(WATCHED)
    for step, reward in enumerate([0.5, None, math.nan, math.inf, 0.75], start=1):
        series.add(step, {"reward": reward})
    assert (series[REWARD].steps, series[REWARD].values) == ([1, 5], [0.5, 0.75])
    assert all(detect(series, Config()) is None for detect in DETECTORS.values())


def test_the_best_window_is_the_one_that_a_search_finds():
    series = Series()
    for step in range(1, 61):
        series.add(step, wavering(0.5, step, by=1.0))
        if step >= 4:
            windows = [series.values[i : i + 4] for i in range(step - 3)]
            assert series.best(4).mean == pytest.approx(max(map(lambda w: sum(w) / 4, windows)))  # noqa: C417
            assert list(series.best(4).values) in windows
            assert series.best(4).last_step - series.best(4).first_step == 3


def test_noise_is_that_about_the_trend():
    def noise(slope: float) -> float:
        series = Series()
        for step in range(1, 201):
            series.add(step, slope * step + 0.1 * (-1) ** step)
        return series.noise

    assert noise(0.0) == pytest.approx(0.1 * math.sqrt(2))
    assert noise(0.01) == pytest.approx(noise(0.0), rel=0.01)
