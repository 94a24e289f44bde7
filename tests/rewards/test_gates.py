"""Gates: where a gate's reward is not above 0, the other functions do not count."""

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.rewards.combine import RewardPipeline
from tests.support.runs import runs

FORMAT = {"name": "format", "weight": 0.5, "gate": True, "kwargs": {"pattern": "[0-9]+"}}
TWO = """
def digit(solution_str): return float(solution_str.isdigit())
def right(solution_str): return {"1": 1.0, "x": 1.0, "2": -1.0}.get(solution_str, 0.0)
"""


def test_behind_a_closed_gate_only_the_gates_count(make_batch, reward_config, reward_file):
    path = reward_file(TWO)
    config = reward_config({"name": f"{path}:right", "weight": 4.0}, FORMAT, {"name": f"{path}:digit", "weight": -1.0})
    rewards = RewardPipeline(config).score(*make_batch([["1", "2", "x"]]))
    assert rewards.total.tolist() == [3.5, -4.5, 0.0]
    assert rewards.per_function["right"].tolist() == [1.0, -1.0, 1.0], "parts are logged as they are"


def test_every_gate_must_be_open_and_all_gates_count(make_batch, reward_config, reward_file):
    path = reward_file("def f(solution_str): return len(solution_str) - 1\ndef g(solution_str): return 10")
    config = reward_config(FORMAT, {"name": f"{path}:f", "gate": True, "weight": 2.0}, {"name": f"{path}:g"})
    rewards = RewardPipeline(config).score(*make_batch([["12", "1", "ab", ""]]))
    assert rewards.total.tolist() == [0.5 + 2.0 + 10, 0.5, 2.0, -2.0]


def test_a_gate_that_failed_is_open_if_its_failure_value_is_above_0(make_batch, reward_config, reward_file):
    path = reward_file("def f(solution_str): return 1 / (solution_str != 'bad')\ndef g(solution_str): return 10")
    for value, total in ((0.5, 10.5), (0.0, 0.0)):
        gate = {"name": f"{path}:f", "gate": True, "on_error": "value", "failure_value": value}
        rewards = RewardPipeline(reward_config(gate, {"name": f"{path}:g"})).score(*make_batch([["bad", "a"]]))
        assert rewards.total.tolist() == [total, 11.0]
    gate = {"name": f"{path}:f", "gate": True, "on_error": "mask_sample"}
    rewards = RewardPipeline(reward_config(gate, {"name": f"{path}:g"})).score(*make_batch([["bad", "a"]]))
    assert (rewards.valid.tolist(), rewards.total.tolist()) == ([False, True], [0.0, 11.0])


@pytest.mark.parametrize(
    ("estimator", "reads"), [("gdpo", "each reward function by itself"), ("process", "rewards of steps")]
)
def test_an_estimator_that_reads_more_than_the_sums_is_refused(estimator, reads, tmp_path):
    gates = "reward.functions=[{name: format, gate: true, kwargs: {pattern: '[0-9]+'}}, exact_match]"
    with pytest.raises(ConfigError, match=rf"functions\.0\.gate=true with .*'{estimator}', which reads {reads}"):
        runs.run(tmp_path, gates, f"algorithm.advantage.name={estimator}")


def test_a_run_with_a_gate_logs_in_how_many_groups_each_reward_does_not_differ(tmp_path):
    gates = "reward.functions=[{name: format, gate: true, kwargs: {pattern: '[a-z]+'}}, exact_match]"
    assert runs.run(tmp_path, gates, "trainer.max_steps=1") == "completed"
    [line] = [each for each in runs.read_lines(tmp_path / "metrics.jsonl") if "reward" in each]
    assert line["reward"] == line["rewards/format/mean"] == 0.0
    assert (line["rewards/format/frac_zero_std"], line["frac_reward_zero_std"]) == (1.0, 1.0)
    assert 0 <= line["rewards/exact_match/frac_zero_std"] <= 1
