"""One update on trajectories that forked into rows: fp64 autograd on each row, with one weight for each trajectory."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from hwgrpo.algorithms.kl import build_kl
from hwgrpo.algorithms.scope import sequence_sum
from hwgrpo.catalog import AGGREGATIONS
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.ragged import offsets_of
from hwgrpo.training.policy.layouts import BRANCHED, GROUPED, GROUPED_MASKED, PACKED, PADDED, Layout
from hwgrpo.training.policy.micro_batch import build_micro_batch, split_micro_batches
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.advantage_inputs import penalize
from hwgrpo.training.update.step_metrics import sample_metrics
from hwgrpo.training.update.train_batch import assemble
from hwgrpo.values import Completions, PromptBatch, TrainBatch
from tests.support.models.steps import gradients, updater
from tests.support.models.tiny import settings, tiny_qwen3
from tests.support.models.trajectories import (
    environment_rewards,
    forked,
    gradient_by_formula,
    rows_of,
    share_of,
    train_batch,
    trajectories,
)
from tests.support.numbers.rounding import STEP, assert_gradients_close
from tests.support.numbers.thread_ranks import on_ranks

CPU = Single(torch.device("cpu"), "gloo")
TERMS = ("algorithm.kl.coef=0.05", "algorithm.entropy_coef=0.01", "rollout.max_response_tokens=32")
GIGPO = ("algorithm.advantage.name=gigpo", "algorithm.advantage.kwargs={gamma: 0.8, step_weight: 0.5}")
PROCESS = ("algorithm.advantage.name=process", "algorithm.process.steps=turns")
LAYOUTS = (PADDED, PACKED, GROUPED, GROUPED_MASKED, BRANCHED)
CUTS = {1: [0, 4], 2: [0, 1, 4], 4: [0, 0, 1, 2, 4]}


def forks(seed: int = 0) -> tuple[PromptBatch, Completions]:
    """Return prompts and trajectories of one to four rows."""
    prompts, completions = trajectories(seed=seed)
    completions = forked(prompts, completions, seed)
    counts = Counter(len(rows_of(prompts, completions, i)) for i in range(len(completions)))
    assert len(counts) > 2, "trajectories of one row, of two, of more"
    return prompts, completions


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("aggregation", AGGREGATIONS.names())
@pytest.mark.parametrize("budget", [48, 10_000])
def test_every_layout_and_aggregation_has_the_gradient_of_the_rows(layout: Layout, aggregation: str, budget: int):
    model, (prompts, completions) = tiny_qwen3(), forks(seed=len(aggregation) % 3)
    words = (f"algorithm.aggregation.name={aggregation}", f"trainer.tokens_per_micro_batch={budget}")
    update = updater(model, *TERMS, *GIGPO, *words, layout=layout)
    batch = train_batch(prompts, completions, update.config, update.strategy)
    loss, ours, sums = gradients(update, batch)
    expected, theirs = gradient_by_formula(model, update.config, prompts, completions)
    assert loss == pytest.approx(expected, rel=STEP, abs=STEP)
    assert_gradients_close(ours, theirs)
    assert batch.loss_mask is not None
    assert sums["tokens"] == int(batch.loss_mask.sum())


@pytest.mark.parametrize("estimator", [PROCESS, GIGPO, ()], ids=["process", "gigpo", "grpo"])
@pytest.mark.parametrize("ranks", CUTS)
def test_any_ranks_and_estimators_have_the_gradient_of_the_rows(estimator: tuple[str, ...], ranks: int):
    model, (prompts, completions) = tiny_qwen3(), forks(seed=1)
    words = (*TERMS, *estimator, "algorithm.aggregation.name=seq-mean-token-mean")
    update = updater(model, *words, "trainer.tokens_per_micro_batch=64", layout=GROUPED)

    def work(own: Any) -> Any:
        first, stop = CUTS[ranks][own.strategy.rank : own.strategy.rank + 2]
        return gradients(own, train_batch(*share_of(prompts, completions, first, stop), own.config, own.strategy))

    expected, theirs = gradient_by_formula(model, update.config, prompts, completions)
    for loss, ours, _ in on_ranks(update, ranks, work):
        assert loss == pytest.approx(expected, rel=STEP, abs=STEP)
        assert_gradients_close(ours, theirs)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("full", [False, True], ids=["rows", "trajectories"])
@pytest.mark.parametrize("budget", [16, 60, 10_000])
def test_each_sampled_token_is_in_the_loss_once_beside_those_of_its_trajectory(layout: Layout, full: bool, budget: int):
    prompts, completions = forks(seed=2)
    batch = train_batch(prompts, completions, settings(), CPU)
    assert batch.loss_mask is not None
    rows = batch.by_rows()
    parts = split_micro_batches(rows, range(len(rows)), budget, layout, 32, full_trajectories=full)
    seen = []
    for part in parts:
        micro = build_micro_batch(rows, part, {"advantage": "advantages"}, layout)
        seen += micro.token_index.tolist()
        trajectory = batch.per_token_of(torch.arange(len(batch)))[micro.token_index]
        bounds = micro.cu_seqlens.tolist()
        spans = [trajectory[start:stop].unique().tolist() for start, stop in itertools.pairwise(bounds)]
        assert all(len(each) == 1 for each in spans)
        assert len({of for [of] in spans}) == len(spans), "the rows of a trajectory are one sequence of the loss"
        if full:
            for [of], (start, stop) in zip(spans, itertools.pairwise(bounds), strict=True):
                assert stop - start == int(batch.loss_lengths[of])
        assert torch.equal(micro.targets, batch.tokens[micro.token_index])
        assert torch.equal(micro.signals["advantage"], batch.advantages[trajectory])
    assert sorted(seen) == batch.loss_mask.nonzero()[:, 0].tolist()
    assert len(parts) > 1 or budget == 10_000


def gspo_by_formula(model: Any, config: Any, batch: TrainBatch, prompts: Any, completions: Any) -> Any:
    """Return loss and gradient, fp64: one ratio for each trajectory, of the sampled tokens of all its rows."""
    model, a = model.double(), config.algorithm
    losses = []
    assert batch.loss_mask is not None
    for i in range(len(completions)):
        gaps = []
        for prompt, start, end in rows_of(prompts, completions, i):
            ids = torch.tensor([[*prompt, *completions.tokens[start:end].tolist()]])
            log_p = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            mask = batch.loss_mask[start:end]
            here = log_p.gather(1, completions.tokens[start:end, None])[:, 0]
            gaps.append((here - completions.logprobs[start:end].double())[mask])
        ratio = torch.cat(gaps).mean().exp()
        advantage = float(batch.advantages[i])
        clipped = ratio.clamp(1 - a.loss.clip_low, 1 + a.loss.clip_high)
        losses.append(torch.maximum(-advantage * ratio, -advantage * clipped))
    loss = torch.stack(losses).mean()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ratio_of_a_sequence_is_that_of_all_its_rows(layout: Layout, ranks: int):
    model, (prompts, completions) = tiny_qwen3(), forks()
    words = ("algorithm.loss.name=gspo", "algorithm.aggregation.name=seq-mean-token-mean", "algorithm.kl.coef=0")
    limits = ("algorithm.loss.clip_low=0.9", "algorithm.loss.clip_high=40", "trainer.tokens_per_micro_batch=40")
    update = updater(model, *words, *limits, layout=layout)
    cuts = CUTS[ranks]

    def work(own: Any) -> Any:
        first, stop = cuts[own.strategy.rank : own.strategy.rank + 2]
        batch = train_batch(*share_of(prompts, completions, first, stop), own.config, own.strategy)
        return gradients(own, replace(batch, ref_logprobs=None))

    found = on_ranks(update, ranks, work)
    batch = train_batch(prompts, completions, update.config, CPU)
    expected, theirs = gspo_by_formula(tiny_qwen3(), update.config, batch, prompts, completions)
    for loss, ours, _ in found:
        assert loss == pytest.approx(expected, rel=STEP, abs=STEP)
        assert_gradients_close(ours, theirs)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_scored_log_probs_are_those_of_each_row_by_itself(layout: Layout):
    model, (prompts, completions) = tiny_qwen3(), forks(seed=1)
    update = updater(model, "trainer.tokens_per_micro_batch=50", layout=layout)
    batch = train_batch(prompts, completions, update.config, CPU)
    wanted = range(0, len(batch), 2)
    found = update.score(batch, sequences=wanted)
    expected = torch.zeros(len(batch.tokens))
    for i in wanted:
        for prompt, start, end in rows_of(prompts, completions, i):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*prompt, *completions.tokens[start:end].tolist()]])).logits[0]
            log_p = logits[len(prompt) - 1 : -1].log_softmax(-1)
            expected[start:end] = log_p.gather(1, completions.tokens[start:end, None])[:, 0]
    expected = expected.where(batch.loss_tokens_of(torch.ones(len(batch), dtype=torch.bool)), 0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_trajectories_without_advantage_are_skipped_with_all_their_rows():
    prompts, completions = forks()
    update = updater(tiny_qwen3(), "algorithm.kl.coef=0", layout=GROUPED)
    batch = replace(train_batch(prompts, completions, update.config, CPU), ref_logprobs=None)
    kept = torch.arange(len(batch)) % 3 != 0
    batch = replace(batch, advantages=torch.where(kept, batch.advantages + 1.0, 0.0))
    assert update.trained_sequences(batch, range(len(batch))) == kept.nonzero()[:, 0].tolist()
    skipping, ours, sums = gradients(update, batch)
    everything = updater(tiny_qwen3(), "algorithm.kl.coef=0", layout=GROUPED)
    everything.__class__ = type("All", (type(everything),), {"skips_zero_advantages": False})
    loss, theirs, of_all = gradients(everything, batch)
    assert skipping == pytest.approx(loss, rel=STEP, abs=STEP)
    assert_gradients_close(ours, theirs)
    assert sums["trained"] == int(batch.loss_lengths[kept].sum()) < of_all["trained"]


def test_statistics_and_metrics_count_trajectories_and_forks():
    prompts, completions = forks()
    one_row = replace(completions, row_starts=None)
    config = settings(*GIGPO)
    found, expected = (train_batch(prompts, each, config, CPU) for each in (completions, one_row))
    assert torch.equal(found.advantages, expected.advantages)
    assert torch.equal(found.advantages_R, expected.advantages_R)
    rewards = environment_rewards(prompts, completions, turns=False)
    other: list = []
    given = rewards, found.advantages
    sample_metrics(prompts, one_row, *given, lambda own: other.append(own) or [own])
    metrics = sample_metrics(prompts, completions, *given, lambda own: [own])
    plain = sample_metrics(prompts, one_row, *given, lambda own: [own])
    rows = [len(rows_of(prompts, completions, i)) for i in range(len(completions))]
    assert metrics["agent/rows_per_trajectory/mean"] == pytest.approx(sum(rows) / len(rows))
    assert metrics["agent/rows_per_trajectory/max"] == max(rows)
    assert metrics["agent/forks"] == sum(rows) - len(rows)
    read = sum(len(before) for i in range(len(rows)) for before, *_ in rows_of(prompts, completions, i))
    assert metrics["perf/total_num_tokens"] == read + len(completions.tokens)
    changed = {"agent/rows_per_trajectory/mean", "agent/rows_per_trajectory/max", "agent/forks"}
    assert {name for name in metrics if metrics[name] != plain.get(name)} == changed | {"perf/total_num_tokens"}
    assert changed.isdisjoint(plain)
    both = sample_metrics(prompts, completions, *given, lambda own: [own, *other])
    assert both["agent/rows_per_trajectory/mean"] == pytest.approx((sum(rows) + len(rows)) / 2 / len(rows))


def test_the_kl_in_the_reward_is_the_sum_over_all_rows():
    prompts, completions = forks(seed=1)
    update = updater(tiny_qwen3(), "algorithm.kl.coef=0.1", "algorithm.kl.in_reward=true")
    rewards = environment_rewards(prompts, completions, turns=False)
    batch = assemble(prompts, completions, torch.zeros(len(completions)), rewards.valid)

    class Reference:
        policy = update.policy

        def active(self) -> Any:
            return torch.no_grad()

    penalized, *_ = penalize(update, Reference(), batch, rewards, batch.rollout_logprobs, Stopwatch())  # type: ignore[arg-type]
    scored = update.score(batch)
    kl = build_kl(update.config.algorithm.kl)(batch.rollout_logprobs.double(), scored.double())
    assert batch.loss_mask is not None
    expected = rewards.total - 0.1 * sequence_sum(kl.where(batch.loss_mask, 0.0), batch.offsets)[0]
    torch.testing.assert_close(penalized.total, expected)


def test_rows_of_a_batch_are_in_their_order_with_the_beginning_of_their_prompt():
    batch = TrainBatch(
        prompt_index=torch.tensor([0, 1, 1]),
        tokens=torch.arange(7),
        offsets=offsets_of(torch.tensor([4, 0, 3])),
        logprobs=torch.zeros(7),
        row_starts=torch.tensor([-1, 2, -1, 1, 3, -1, 1]),
        prompt_tokens=torch.tensor([50, 51, 60, 61, 62]),
        prompt_offsets=torch.tensor([0, 2, 5]),
        advantages=torch.tensor([1.0, 2.0, 3.0]),
    )
    rows = batch.by_rows()
    read = [
        (
            rows.prompt_tokens[rows.prompt_offsets[p] : rows.prompt_offsets[p + 1]].tolist(),
            tokens,
        )
        for p, tokens in zip(rows.prompt_index.tolist(), rows.token_lists(), strict=True)
    ]
    assert read == [
        ([50, 51], [0]),
        ([50, 51], [1, 2]),
        ([50], [3]),
        ([60, 61, 62], []),
        ([60, 61, 62], []),
        ([60, 61, 62], [4, 5]),
        ([60], [6]),
    ]
    assert rows.trajectory is not None
    assert rows.trajectory.tolist() == [0, 0, 0, 1, 2, 2, 2]
    assert rows.advantages.tolist() == [1, 1, 1, 2, 3, 3, 3]
    assert batch.longest_rows.tolist() == [2, 0, 2]
    assert batch.turn_ends() == [[0, 2, 3], [-1], [1, 2]]
    assert replace(batch, row_starts=None).by_rows().trajectory is None
    masked = replace(batch, loss_mask=torch.tensor([True, False, True, True, True, False, True]))
    assert masked.new_tokens() == [[0, 2, 3], [], [4, 5, 6]]
