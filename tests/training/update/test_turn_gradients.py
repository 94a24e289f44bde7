"""One update on trajectories with observed tokens between turns, against fp64 autograd on the sampled tokens' rows."""

import itertools

import pytest
import torch

from hwgrpo.catalog import AGGREGATIONS
from hwgrpo.training.policy.layouts import BRANCHED, GROUPED, GROUPED_MASKED, PACKED, PADDED, Layout
from hwgrpo.training.strategies.single import Single
from tests.support.models.steps import gradients, updater
from tests.support.models.tiny import tiny_qwen3
from tests.support.models.trajectories import (
    advantages_by_formula,
    gradient_by_formula,
    share_of,
    train_batch,
    trajectories,
)
from tests.support.numbers.rounding import STEP, assert_gradients_close
from tests.support.numbers.thread_ranks import on_ranks

TERMS = ("algorithm.kl.coef=0.05", "algorithm.entropy_coef=0.01", "rollout.max_response_tokens=32")
ESTIMATORS = {
    "gigpo": ("algorithm.advantage.name=gigpo", "algorithm.advantage.kwargs={gamma: 0.8, step_weight: 0.5}"),
    "process": ("algorithm.advantage.name=process", "algorithm.process.steps=turns"),
    "grpo": ("algorithm.advantage.name=grpo",),
}
CUTS = {2: [0, 1, 4], 4: [0, 0, 1, 2, 4]}
"""Where each number of ranks cuts the prompts: shares are unequal, and one may be empty."""


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("std", ["group", "none"])
def test_advantages_of_turns_are_those_of_the_formula(estimator: str, std: str):
    prompts, completions = trajectories(prompts=8, seed=3)
    config = updater(tiny_qwen3(), *ESTIMATORS[estimator], f"algorithm.advantage.std={std}").config
    batch = train_batch(prompts, completions, config, Single(torch.device("cpu"), "gloo"))
    assert batch.loss_mask is not None
    expected = torch.tensor([*itertools.chain(*advantages_by_formula(completions, config))])
    assert len(expected[batch.loss_mask].unique()) > 8, "turns differ"
    torch.testing.assert_close(batch.advantages_R[batch.loss_mask], expected[batch.loss_mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("layout", [PADDED, PACKED, GROUPED, GROUPED_MASKED, BRANCHED], ids=lambda layout: layout.name)
@pytest.mark.parametrize("budget", [64, 10_000])
def test_every_layout_has_the_gradient_of_the_sampled_tokens(layout: Layout, estimator: str, budget: int):
    model, (prompts, completions) = tiny_qwen3(), trajectories()
    words = (*TERMS, *ESTIMATORS[estimator], f"trainer.tokens_per_micro_batch={budget}")
    update = updater(model, *words, layout=layout)
    batch = train_batch(prompts, completions, update.config, update.strategy)
    loss, ours, sums = gradients(update, batch)
    expected, theirs = gradient_by_formula(model, update.config, prompts, completions)
    assert loss == pytest.approx(expected, rel=STEP, abs=STEP)
    assert_gradients_close(ours, theirs)
    assert batch.loss_mask is not None
    assert sums["tokens"] == int(batch.loss_mask.sum()) < len(batch.tokens)


@pytest.mark.parametrize("aggregation", AGGREGATIONS.names())
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_aggregation_weighs_sampled_tokens_alike_on_any_ranks(aggregation: str, ranks: int):
    model, (prompts, completions) = tiny_qwen3(), trajectories(seed=1)
    words = (*TERMS, *ESTIMATORS["gigpo"], f"algorithm.aggregation.name={aggregation}")
    update = updater(model, *words, "trainer.tokens_per_micro_batch=64", layout=GROUPED)
    cuts = CUTS.get(ranks, [0, 4])

    def work(own):
        mine = share_of(prompts, completions, cuts[own.strategy.rank], cuts[own.strategy.rank + 1])
        return gradients(own, train_batch(*mine, own.config, own.strategy))

    expected, theirs = gradient_by_formula(model, update.config, prompts, completions)
    for loss, ours, _ in on_ranks(update, ranks, work):
        assert loss == pytest.approx(expected, rel=STEP, abs=STEP)
        assert_gradients_close(ours, theirs)
