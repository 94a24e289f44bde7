"""Sequences with zero advantage are left out where nothing depends on them, and numbers stay what they would be."""

from dataclasses import replace

import pytest
import torch

from hwgrpo.training.policy.layouts import GROUPED, PADDED
from tests.support.models.steps import gradients, reference_gradients, updater
from tests.support.models.tiny import ragged_batch, tiny_qwen3
from tests.support.numbers.rounding import STEP, assert_gradients_close


def some_zero(**kinds):
    batch = ragged_batch(**kinds)
    advantages = batch.advantages.clone()
    advantages[[0, 1, 2, 4, 9]] = 0.0
    return replace(batch, advantages=advantages)


def computed(update, batch) -> list[int]:
    return sorted(
        s
        for part in update._micro_batches(batch, update.trained_sequences(batch, range(len(batch))))
        for row in part
        for s in row
    )


@pytest.mark.parametrize("layout", [PADDED, GROUPED], ids=lambda layout: layout.name)
@pytest.mark.parametrize("words", [[], ["algorithm.aggregation.name=seq-mean-token-mean"]], ids=["tokens", "sequences"])
def test_leaving_out_zero_advantages_keeps_the_gradient(layout, words):
    batch = some_zero(old=True)
    update = updater(tiny_qwen3(), *words, layout=layout)
    assert computed(update, batch) == [3, 5, 6, 7, 8, 10, 11]
    loss, ours, sums = gradients(update, batch)
    expected_loss, theirs = reference_gradients(tiny_qwen3(), update.config, batch)
    assert loss == pytest.approx(expected_loss, rel=STEP, abs=STEP)
    assert_gradients_close(ours, theirs)
    assert sums["tokens"] == len(batch.tokens)
    assert sums["trained"] == int(batch.lengths[[3, 5, 6, 7, 8, 10, 11]].sum())


@pytest.mark.parametrize("word", ["algorithm.kl.coef=0.1", "algorithm.entropy_coef=0.01"])
def test_nothing_is_left_out_where_every_token_has_a_gradient(word: str):
    batch = some_zero(old=True, ref=True)
    update = updater(tiny_qwen3(), word)
    assert computed(update, batch) == list(range(len(batch)))
    _, ours, sums = gradients(update, batch)
    assert_gradients_close(ours, reference_gradients(tiny_qwen3(), update.config, batch)[1])
    assert sums["trained"] == sums["tokens"]


def test_the_entropy_of_what_was_left_out_comes_from_its_rollout_log_probs():
    batch = some_zero()
    update = updater(tiny_qwen3())
    _, _, sums = gradients(update, batch)
    kept = torch.ones(len(batch), dtype=torch.bool)
    kept[[0, 1, 2, 4, 9]] = False
    alone = replace(batch, advantages=torch.where(kept, 1.0, 0.0))
    _, _, parts = gradients(update, alone)
    left_out = torch.repeat_interleave(~kept, batch.lengths)
    assert sums["entropy"] == pytest.approx(parts["entropy"], rel=STEP)
    all_of_them = gradients(update, replace(batch, advantages=torch.ones(len(batch))))[2]["entropy"]
    none_of_them = gradients(update, replace(batch, advantages=torch.zeros(len(batch))))[2]["entropy"]
    assert none_of_them == pytest.approx(-float(batch.rollout_logprobs.sum()), rel=STEP)
    only_left_out = gradients(update, replace(batch, advantages=torch.where(kept, 0.0, 1.0)))[2]["entropy"]
    surprise = -float(batch.rollout_logprobs[left_out].sum())
    rest = -float(batch.rollout_logprobs[~left_out].sum())
    assert (sums["entropy"] - surprise) + (only_left_out - rest) == pytest.approx(all_of_them, rel=STEP)


def test_the_gap_to_the_rollout_engine_is_measured_on_what_was_computed():
    batch = some_zero()
    update = updater(tiny_qwen3(), "optim.lr=1e-9")
    batch = replace(batch, logprobs=update.score(batch))
    metrics = update(batch)
    assert abs(metrics["training/rollout_probs_diff_max"]) < STEP
    assert metrics["actor/trained_tokens_ratio"] == pytest.approx(
        float(batch.lengths[batch.advantages != 0].sum()) / len(batch.tokens)
    )


def test_ratios_off_policy_are_means_over_what_was_trained():
    batch = some_zero(old=True)
    update = updater(tiny_qwen3(), "optim.lr=1e-9", "trainer.epochs_per_batch=2")
    exact = replace(batch, old_logprobs=update.score(batch) - 0.1)
    metrics = update(exact)
    assert metrics["actor/ratio_mean"] == pytest.approx(torch.tensor(0.1).exp().item(), rel=1e-3)
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.1, rel=1e-3)


def test_a_step_of_equal_rewards_has_a_zero_gradient_and_moves_only_as_momentum_does():
    batch = replace(ragged_batch(), advantages=torch.zeros(12))
    update = updater(tiny_qwen3(), "optim.lr=1e-2")
    before = [p.clone() for p in update.policy.parameters()]
    metrics = update(batch)
    assert metrics["actor/grad_norm"] == 0
    assert metrics["actor/loss"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, update.policy.parameters(), strict=True))
    update(ragged_batch())
    moved = [p.clone() for p in update.policy.parameters()]
    update(batch)
    assert not all(torch.equal(a, b) for a, b in zip(moved, update.policy.parameters(), strict=True))
