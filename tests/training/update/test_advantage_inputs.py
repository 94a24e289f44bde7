"""Probabilities that advantages are computed from: their pass, their place, and runs with them."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwgrpo.config import load_config
from hwgrpo.errors import DataError, RunError
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.ragged import offsets_of
from hwgrpo.training.policy.layouts import BRANCHED, PACKED, PADDED, Layout
from hwgrpo.training.update.advantage_inputs import advantage_inputs
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import Completions, Rewards, TrainBatch
from tests.support.models.steps import updater
from tests.support.models.tiny import ragged_batch, tiny_qwen3
from tests.support.numbers.rounding import assert_values_close
from tests.support.processes import ranks
from tests.support.runs import runs

FAILING = """
import torch.distributed as dist

from hwgrpo.errors import DataError


def failing(rewards_S, group_S, valid_S, config, lengths_S, *, token_probs):
    assert len(token_probs.logprobs) == len(token_probs.square_sums) == lengths_S.sum()
    if dist.get_rank() == 1:
        raise DataError("this fails on rank 1")
    return rewards_S.float()
"""
NAME = "algorithm.advantage.name=optimal_token_baseline"


def exact(model: Any, batch: TrainBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums of squares and entropies [R] from full logits in fp64, one response at a time."""
    model, squares, entropies = copy.deepcopy(model).double(), [], []
    for s in range(len(batch)):
        p = int(batch.prompt_index[s])
        prompt = batch.prompt_tokens[batch.prompt_offsets[p] : batch.prompt_offsets[p + 1]]
        tokens = batch.tokens[batch.offsets[s] : batch.offsets[s + 1]]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
        log_p = (logits / temperature).log_softmax(-1)
        squares.append(log_p.exp().square().sum(-1))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(squares), torch.cat(entropies)


@pytest.mark.parametrize("budget", [32, 4096])
@pytest.mark.parametrize("layout", [PADDED, PACKED, BRANCHED], ids=lambda layout: layout.name)
def test_a_scoring_pass_sums_squared_probabilities_at_the_temperature(layout: Layout, budget: int):
    model, batch = tiny_qwen3(), ragged_batch(empty=True)
    words = ("rollout.temperature=0.6", f"trainer.tokens_per_micro_batch={budget}")
    update = updater(model, *words, layout=layout)
    squares, entropies = torch.zeros(2, len(batch.tokens))
    logprobs = update.score(batch, square_sums=squares, entropies=entropies)
    assert torch.equal(update.score(batch), logprobs)
    for found, expected in zip((squares, entropies), exact(model, batch, 0.6), strict=True):
        assert_values_close(found, expected)


def test_responses_that_are_not_scored_have_no_sums():
    update, batch = updater(tiny_qwen3()), ragged_batch()
    squares = torch.zeros(len(batch.tokens))
    update.score(batch, sequences=[1], square_sums=squares)
    first, end = batch.offsets[1:3].tolist()
    assert squares[first:end].all()
    assert squares.count_nonzero() == end - first


def inputs(*words: str, needs_old: bool = True) -> Any:
    """Return what advantages of four responses of 2, 3 (invalid), 0 and 3 tokens are computed from."""
    lengths, valid = torch.tensor([2, 3, 0, 3]), torch.tensor([True, False, True, True])
    total = torch.tensor([1.0, 7.0, 0.5, 0.0], dtype=torch.float64)

    def score(batch: TrainBatch, policy: Any = None, square_sums: torch.Tensor | None = None) -> torch.Tensor:
        if square_sums is not None:
            square_sums += 0.25 + batch.tokens / 100
        return -1 - batch.tokens / 10

    update: Any = SimpleNamespace(
        config=load_config("tiny_sort", [*words]), score=score, needs_old_logprobs=needs_old,
        strategy=SimpleNamespace(rank=0, gather_objects=lambda value: [value]),
    )  # fmt: skip
    completions = Completions(
        prompt_index=torch.tensor([0, 0, 1, 1]), tokens=torch.arange(8), offsets=offsets_of(lengths),
        logprobs=torch.full((8,), -9.0), finished=valid, texts=("",) * 4,
    )  # fmt: skip
    prompts: Any = SimpleNamespace(prompts=[SimpleNamespace(token_ids=[i], images=None) for i in (1, 2)])
    rewards = Rewards(total, valid, {"r": total})
    return advantage_inputs(update, None, prompts, completions, rewards, Stopwatch())


@pytest.mark.parametrize("words", [(), ("algorithm.old_logprobs=rollout",)], ids=["trainer", "rollout"])
def test_probabilities_are_the_trainers_at_the_tokens_of_valid_responses(words: tuple[str, ...]):
    found = inputs(NAME, *words)
    kept = torch.tensor([1, 1, 0, 0, 0, 1, 1, 1])
    torch.testing.assert_close(found.token_probs.logprobs, kept * (-1 - torch.arange(8) / 10))
    torch.testing.assert_close(found.token_probs.square_sums, kept * (0.25 + torch.arange(8) / 100))


def test_the_pass_also_gives_the_updates_old_log_probs_where_it_needs_them():
    nothing = torch.zeros(0)
    batch = TrainBatch(nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    trained, lengths = torch.tensor([False, False, True, True]), torch.tensor([2, 3, 0, 3])
    found = inputs(NAME).add_old_logprobs(batch, trained, lengths)
    assert found.old_logprobs.tolist() == pytest.approx([-1.5, -1.6, -1.7])
    assert inputs(NAME, needs_old=False).add_old_logprobs(batch, trained, lengths).old_logprobs is None


def test_other_estimators_get_no_pass():
    found = inputs()
    assert found.token_probs is None
    assert found.old_logprobs is None


def test_a_run_learns(tmp_path: Path):
    def train() -> None:
        torch.set_num_threads(1)
        words = ("trainer.max_steps=40", "trainer.prompts_per_step=8", "rollout.n=8", "optim.lr=1e-2")
        runs.run(tmp_path / "run", NAME, *words, "trainer.validate_every=0")

    assert runs.forked(train) == 0
    rewards = [line["reward"] for line in runs.metrics(tmp_path / "run") if "actor/loss" in line]
    # 320 samples of five steps, whose rewards have a standard deviation near 0.2: known to 0.011
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.08


@pytest.mark.parametrize("words", [(), ("trainer.prompts_per_update=2",)], ids=["on policy", "off policy"])
def test_a_run_scores_the_old_policy_once_a_step(words: tuple[str, ...], tmp_path: Path, monkeypatch):
    def train() -> None:
        torch.set_num_threads(1)
        calls, score = [], PolicyUpdate.score
        monkeypatch.setattr(PolicyUpdate, "score", lambda *a, **k: calls.append(k) or score(*a, **k))
        quiet = ("trainer.validate_every=0", "trainer.resume_check=off")  # a checkpoint's scores are none of a step
        runs.run(tmp_path / "run", NAME, "trainer.max_steps=3", *quiet, *words)
        assert len(calls) == 3

    assert runs.forked(train) == 0
    steps = [line for line in runs.metrics(tmp_path / "run") if "actor/loss" in line]
    assert all(("actor/ppo_kl" in line) == bool(words) for line in steps), "the ratio is 1 with one update"


def test_two_ranks_train_as_one(tmp_path: Path):
    def train(processes: int) -> dict[str, float]:
        folder = tmp_path / str(processes)
        strategy = f"trainer.strategy={'ddp' if processes > 1 else 'single'}"

        def body(rank: int) -> None:
            torch.set_num_threads(1)
            runs.run(folder, strategy, NAME, "trainer.max_steps=1", "trainer.validate_every=0")

        assert ranks.forked(processes, body) == [0] * processes
        return next(line for line in runs.metrics(folder) if "actor/loss" in line)

    one, two = train(1), train(2)
    assert one["critic/advantages/min"] < 0 < one["critic/advantages/max"]
    for name in ("grad_norm", "pg_loss"):
        assert two[f"actor/{name}"] == pytest.approx(one[f"actor/{name}"], rel=1e-4, abs=1e-6)
    for name in ("mean", "min", "max"):
        assert two[f"critic/advantages/{name}"] == pytest.approx(one[f"critic/advantages/{name}"], rel=1e-4, abs=1e-6)


def test_an_error_of_one_ranks_estimator_ends_all(tmp_path: Path):
    own = tmp_path / "own.py"
    own.write_text(FAILING)

    def body(rank: int) -> None:
        torch.set_num_threads(1)
        with pytest.raises((DataError, RunError), match="on rank 1"):
            runs.run(tmp_path / "run", "trainer.strategy=ddp", f"algorithm.advantage.name={own}:failing")

    assert ranks.forked(2, body) == [0, 0]
