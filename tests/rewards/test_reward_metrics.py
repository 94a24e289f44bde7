"""Metrics of rewards that are classes: averaged or summed over ranks, with running totals that a checkpoint keeps."""

import json

import pytest

from hwgrpo.errors import RunError
from hwgrpo.rewards.combine import RewardPipeline
from tests.support.runs import runs

MEASURED = """
class Measured:
    def __init__(self, loss=1.0):
        self.loss, self.scored = loss, 0
    def __call__(self, batch, completions):
        self.scored += len(completions)
        return [float(len(text)) for text in completions.texts]
    def metrics(self):
        return {"loss": self.loss}
    def counts(self):
        scored, self.scored = self.scored, 0
        return {"responses": scored}
class Plain:
    def __call__(self, batch, completions): return [0.0] * len(completions)
class Raising(Plain):
    def metrics(self): raise KeyError("loss")
class Text(Plain):
    def counts(self): return {"responses": "many"}
class Unbounded(Plain):
    def counts(self): return {"cost": float("nan")}
class Bare(Plain):
    def metrics(self): return 3
"""


@pytest.fixture
def rewards(reward_config, reward_file):
    """Return a function: names of classes -> their pipeline."""
    path = reward_file(MEASURED)
    return lambda *names: RewardPipeline(reward_config(*({"name": f"{path}:{name}"} for name in names)))


def test_metrics_are_averaged_and_counts_summed_over_ranks_with_a_total(rewards):
    metrics = rewards("Measured", "Plain").metrics
    ranks = [
        {"Measured": {"metrics": {"loss": 1.0, "own": 5.0}, "counts": {"responses": 3.0}}},
        {"Measured": {"metrics": {"loss": 2.0}, "counts": {"responses": 4.0}}},
    ]
    first, second = metrics.over_ranks(ranks), metrics.over_ranks(ranks)
    assert first == {
        "reward/Measured/loss": 1.5,
        "reward/Measured/own": 5.0,
        "reward/Measured/responses": 7.0,
        "reward/Measured/total_responses": 7.0,
    }
    assert second == first | {"reward/Measured/total_responses": 14.0}


def test_each_reward_has_its_own_and_one_without_has_none(rewards, make_batch):
    pipeline = rewards("Measured", "Measured", "Plain")
    pipeline.score(*make_batch([["a", "b"]]))
    values = pipeline.metrics.over_ranks([pipeline.metrics.read()])
    assert {name: value for name, value in values.items() if "/total_" not in name} == {
        f"reward/{name}/{metric}": value
        for name in ("Measured", "Measured_2")
        for metric, value in (("loss", 1.0), ("responses", 2.0))
    }
    assert not rewards("Plain").metrics


def test_totals_continue_from_a_checkpoint_without_those_of_removed_functions(rewards):
    metrics = rewards("Measured").metrics
    metrics.restore({"Measured": {"responses": 10.0}, "judge": {"cost": 1.0}})
    values = metrics.over_ranks([{"Measured": {"counts": {"responses": 2.0}}}])
    assert values["reward/Measured/total_responses"] == 12.0
    assert metrics.state() == {"Measured": {"responses": 12.0}}


@pytest.mark.parametrize(
    "name, message",
    [
        ("Raising", r"reward Raising: metrics\(\) raised KeyError"),
        ("Text", r"reward Text: counts\(\) must return finite numbers by name; 'responses' is 'many'"),
        ("Unbounded", r"reward Unbounded: counts\(\) must return finite numbers by name; 'cost' is nan"),
        ("Bare", r"reward Bare: metrics\(\) raised TypeError"),
    ],
)
def test_a_method_that_fails_is_named(rewards, name, message):
    with pytest.raises(RunError, match=message):
        rewards(name).metrics.read()


def test_a_run_logs_them_for_steps_and_validations_and_resumes_its_totals(tmp_path, reward_file):
    function = json.dumps([{"name": f"{reward_file(MEASURED)}:Measured", "kwargs": {"loss": 0.25}}])
    settings = (f"reward.functions={function}", "trainer.validate_every=1", "trainer.validation_n=0")
    runs.run(tmp_path / "whole", *settings, "trainer.max_steps=3")
    runs.run(tmp_path / "parts", *settings, "trainer.max_steps=2")
    runs.run(tmp_path / "parts", *settings, "trainer.max_steps=3")
    lines = runs.metrics(tmp_path / "whole")
    counted = [(line["step"], line["reward/Measured/responses"]) for line in lines]
    assert counted == [(0, 8), (1, 16), (1, 8), (2, 16), (2, 8), (3, 16), (3, 8)]  # validations, and steps of 4 prompts
    assert [line["reward/Measured/total_responses"] for line in lines] == [8, 24, 32, 48, 56, 72, 80]
    assert all(line["reward/Measured/loss"] == 0.25 for line in lines)
    resumed = runs.metrics(tmp_path / "parts")
    assert resumed[-1]["reward/Measured/total_responses"] == 80
