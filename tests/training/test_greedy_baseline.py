"""ReMax: each prompt's greedy response is sampled beside the others, and its reward is their baseline."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwgrpo.config import load_config
from hwgrpo.errors import RewardError
from hwgrpo.training.loop import train
from hwgrpo.training.setup import build_run
from hwgrpo.training.stages.score import GreedyRewards
from hwgrpo.training.stages.stage import StepState
from hwgrpo.training.update.train_batch import advantages_over_ranks
from hwgrpo.values import Completions, Rewards
from tests.support.runs import runs

MODEL = "model.path=builtin://tiny?task=sort&hidden=32&layers=1&steps=200&batch=32&digits=3"
REMAX = ("algorithm.preset=remax", "trainer.max_steps=2", "trainer.validate_every=0", "rollout.n=3")
FAILING = """
import random

def at_random(completions):
    if len(completions) == 4:  # the greedy ones: one to each prompt
        raise ValueError("no reward")
    return [random.random() for _ in completions]
"""


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Rewards]:
    """Return a list into which each step's rewards with their baselines go."""
    seen: list[Rewards] = []
    original = GreedyRewards.__call__

    def keep(stage: GreedyRewards, state: StepState) -> None:
        original(stage, state)
        seen.append(state.rewards)

    monkeypatch.setattr(GreedyRewards, "__call__", keep)
    return seen


def steps_of(output: Path) -> list[dict[str, Any]]:
    return [line for line in runs.metrics(output) if "reward" in line]


def test_the_baseline_is_what_greedy_decoding_by_the_same_weights_earns(tmp_path: Path, monkeypatch):
    seen = watched(monkeypatch)
    config = runs.small(tmp_path / "run", *REMAX, MODEL, "data.validation_max_rows=7")
    run = build_run(config, runs.BACKEND, 0, 1)
    greedy = []
    original = run.engine.generate

    def generate(prompts, sampling):
        completions = original(prompts, sampling)
        if sampling.greedy and len(prompts) == 4:  # others validate
            again = original(prompts, sampling)
            assert torch.equal(again.tokens, completions.tokens)
            greedy.append(run.rewards.score(prompts, completions).total)
        return completions

    monkeypatch.setattr(run.engine, "generate", generate)
    train(run)
    run.close()
    assert len(seen) == len(greedy) == 2
    for rewards, total_G in zip(seen, greedy, strict=True):
        assert rewards.greedy is not None
        assert len(total_G.unique()) > 1
        assert torch.equal(rewards.greedy, total_G.repeat_interleave(3))
    logged = [line["critic/greedy_rewards/mean"] for line in steps_of(tmp_path / "run")]
    assert logged == pytest.approx([float(total_G.mean()) for total_G in greedy])


def test_failures_on_greedy_responses_are_counted_and_the_group_is_the_baseline(tmp_path: Path, monkeypatch):
    (tmp_path / "rewards.py").write_text(FAILING)
    seen = watched(monkeypatch)
    function = {"name": f"{tmp_path}/rewards.py:at_random", "on_error": "mask_sample"}
    runs.run(
        tmp_path / "run",
        *REMAX,
        f"reward.functions={json.dumps([function])}",
        "data.validation_max_rows=8",
    )
    for rewards in seen:
        assert rewards.greedy is not None
        assert rewards.greedy.isnan().all()
        assert rewards.failures == {"errors/at_random": 4}
    lines = steps_of(tmp_path / "run")
    assert all(line["reward_failures/errors/at_random"] == 4 for line in lines)
    assert all(line["critic/advantages/max"] > 0 > line["critic/advantages/min"] for line in lines)


def test_the_message_says_that_the_greedy_response_failed(tmp_path: Path, capsys):
    (tmp_path / "rewards.py").write_text(FAILING)
    function = {"name": f"{tmp_path}/rewards.py:at_random", "on_error": "mask_sample"}
    words = (*REMAX, "data.validation_max_rows=8", "observe.progress=plain")
    runs.run(tmp_path / "run", *words, f"reward.functions={json.dumps([function])}")
    noted = "4 samples in step 1 (on the greedy response to the prompt, the baseline of the others: reward at_random,"
    assert noted in capsys.readouterr().out
    function["on_error"] = "raise"
    with pytest.raises(RewardError, match="on the greedy response to the prompt, the baseline of the others: rew"):
        runs.run(tmp_path / "raised", *words, f"reward.functions={json.dumps([function])}")


PREFETCHING = """
from contextlib import contextmanager
from dataclasses import replace
from hwgrpo.training.feed.on_demand import OnDemand, on_demand

class Source(OnDemand):
    exclusive = False

    def next(self, step):
        return replace(super().next(step), greedy=None)  # a source of one's own samples none

    @contextmanager
    def exclusive_engine(self):
        type(self).exclusive = True
        yield
        type(self).exclusive = False

def source(parts):
    made = Source(**vars(on_demand(parts)))
    made.collector = made.collector.collector
    generate = parts.engine.generate

    def checked(prompts, sampling):
        assert Source.exclusive or not sampling.greedy, "the engine is in use"
        return generate(prompts, sampling)

    parts.engine.generate = checked
    return made
"""


def test_a_source_that_prefetches_lends_its_engine(tmp_path: Path):
    (tmp_path / "source.py").write_text(PREFETCHING)
    assert runs.run(tmp_path / "run", *REMAX, f"rollout.source={tmp_path}/source.py:source") == "completed"
    assert all("critic/greedy_rewards/mean" in line for line in steps_of(tmp_path / "run"))


def test_it_resumes_bit_for_bit(tmp_path: Path):
    runs.run(tmp_path / "whole", *REMAX, MODEL, "trainer.max_steps=3")
    runs.run(tmp_path / "parts", *REMAX, MODEL)
    runs.run(tmp_path / "parts", *REMAX, MODEL, "trainer.max_steps=3")
    whole, parts = (runs.everything(tmp_path / name) for name in ("whole", "parts"))
    assert parts["weights"] == whole["weights"]
    assert parts["completions"] == whole["completions"]


def test_other_estimators_sample_no_greedy_responses(tmp_path: Path, monkeypatch):
    seen = watched(monkeypatch)
    runs.run(tmp_path / "run", "trainer.max_steps=1", "trainer.validate_every=0")
    assert seen == []
    assert "critic/greedy_rewards/mean" not in steps_of(tmp_path / "run")[0]


def test_one_response_is_enough():
    for preset in ("remax", "online_rft"):
        assert load_config("tiny_sort", [f"algorithm.preset={preset}", "rollout.n=1"]).rollout.n == 1


def test_a_rank_gets_the_advantages_of_its_own_prompts():
    there = Rewards(torch.tensor([0.25]).double(), torch.ones(1).bool(), {}, greedy=torch.tensor([-8.75]).double())
    other = (there, torch.tensor([0]), torch.tensor([1]), None)
    strategy: Any = SimpleNamespace(rank=1, gather_objects=lambda value: [other, value])
    estimator = load_config("tiny_sort", ["algorithm.preset=remax"]).algorithm.advantage
    reward, finished = torch.tensor([1.0, 0.0]).double(), torch.ones(2).bool()
    rewards = Rewards(reward, finished, {}, greedy=torch.tensor([0.75, 0.5]).double())
    completions = Completions(
        prompt_index=torch.tensor([0, 1]),
        tokens=torch.zeros(4, dtype=torch.int64),
        offsets=torch.tensor([0, 2, 4]),
        logprobs=torch.zeros(4),
        finished=finished,
        texts=("",) * 2,
    )
    found, per_token = advantages_over_ranks(estimator, [], completions, rewards, strategy)
    assert (found.tolist(), per_token) == ([0.25, -0.5], None)
