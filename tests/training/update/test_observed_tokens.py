"""Nothing reads the values of observed tokens, and nothing counts them where sampled tokens are counted."""

import itertools
from dataclasses import replace

import pytest
import torch

from hwgrpo.algorithms.token_advantages import TokenProbs
from hwgrpo.ragged import offsets_of
from hwgrpo.training.policy.layouts import GROUPED
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.policy_update import select_tokens
from hwgrpo.training.update.step_metrics import gap_to_rollout, sample_metrics
from hwgrpo.training.update.train_batch import advantages_over_ranks
from hwgrpo.values import Responses, TrainBatch
from tests.support.models.steps import updater
from tests.support.models.tiny import settings, tiny_qwen3
from tests.support.models.trajectories import environment_rewards, train_batch, trajectories

CPU = Single(torch.device("cpu"), "gloo")
GIGPO = "algorithm.advantage.name=gigpo"
CASES = {
    "correction of tokens": (GIGPO, "algorithm.correction.name=token_truncate", "algorithm.correction.high=1.5"),
    "correction of sequences": (GIGPO, "algorithm.correction.name=sequence_truncate", "algorithm.correction.high=1.5"),
    "geometric correction, normalized": (
        *(GIGPO, "algorithm.correction.name=geometric_truncate", "algorithm.correction.high=1.5"),
        "algorithm.correction.normalize=true",
    ),
    "rejected sequences": ("algorithm.correction.reject={seq_mean_k3: 0.2, seq_max_k2: 20, veto: 1e-6}",),
    "off-policy mask": ("algorithm.off_policy_threshold=0.1",),
    "interpolated": (GIGPO, "algorithm.old_logprobs=interpolated"),
    "most uncertain tokens": (GIGPO, "algorithm.top_entropy_share=0.3"),
    "entropy bonus of the most uncertain": (GIGPO, "algorithm.top_entropy_share=0.3", "algorithm.entropy_coef=0.1"),
    "trusted tokens": (GIGPO, "algorithm.m2po_threshold=0.04"),
    "covariances": ("algorithm.loss.name=clip_cov",),
    "covariances, KL": ("algorithm.loss.name=kl_cov",),
    "ratio of sequences": (GIGPO, "algorithm.loss.name=gspo"),
    "geometric mean": ("algorithm.loss.name=gmpo", "algorithm.aggregation.name=seq-mean-token-mean"),
    "gamma of sequences": ("algorithm.loss.name=vespo",),
    "clipped weights": (GIGPO, "algorithm.loss.name=cispo"),
    "adapted coefficients": (
        *(GIGPO, "algorithm.kl.coef=0.1", "algorithm.kl.target=0.05", "algorithm.kl.horizon=2000"),
        *("algorithm.entropy_target=0.2", "algorithm.aggregation.name=prompt-mean"),
    ),
}


def with_observed(batch: TrainBatch, value: float) -> TrainBatch:
    """Return the batch with a value in place of everything that there is of observed tokens beside the tokens."""
    assert batch.loss_mask is not None
    mask = batch.loss_mask
    columns = {
        name: getattr(batch, name).where(mask, value)
        for name in ("logprobs", "old_logprobs", "ref_logprobs", "rollout_shares", "token_advantages")
        if getattr(batch, name) is not None
    }
    return replace(batch, **columns, token_extras={"mine": torch.arange(len(mask)).float().where(mask, value)})


def mixed_batch(config) -> TrainBatch:
    """Return trajectories of which the first three have no advantage, so that their passes may be skipped."""
    prompts, completions = trajectories(seed=4)
    batch = train_batch(prompts, completions, config, CPU)
    kept = (batch.prompt_index > 0).float()
    of_tokens = None if batch.token_advantages is None else batch.token_advantages * batch.per_token_of(kept)
    trained_by = batch.rollout_logprobs + 0.2 * torch.sin(torch.arange(len(batch.tokens)).float())
    shares = torch.full((len(batch.tokens),), 0.5) if config.algorithm.old_logprobs == "interpolated" else None
    old = None if shares is not None else trained_by
    return replace(
        batch,
        advantages=batch.advantages * kept,
        token_advantages=of_tokens,
        old_logprobs=old,
        rollout_shares=shares,
        ref_logprobs=batch.ref_logprobs if config.algorithm.kl.coef else None,
    )


@pytest.mark.parametrize("case", CASES)
def test_no_value_of_an_observed_token_reaches_gradient_or_metrics(case: str):
    """Metrics and new weights are the same to the bit, whatever the values of observed tokens are."""
    results = []
    for value in (0.0, 7.5, -1000.0):
        update = updater(tiny_qwen3(), *CASES[case], "optim.lr=1e-2", layout=GROUPED)
        metrics = update(with_observed(mixed_batch(update.config), value))
        results.append((metrics, update.worst_token, [p.detach().clone() for p in update.policy.parameters()]))
    first = results[0]
    assert first[0]["actor/grad_norm"] > 1e-3
    for metrics, worst, weights in results[1:]:
        assert metrics == first[0]
        assert worst == first[1]
        assert all(torch.equal(a, b) for a, b in zip(weights, first[2], strict=True))


def without_observed(batch: TrainBatch) -> TrainBatch:
    """Return the batch without observed tokens."""
    assert batch.loss_mask is not None
    mask = batch.loss_mask
    columns = {
        name: getattr(batch, name)[mask]
        for name in ("tokens", "logprobs", "old_logprobs", "ref_logprobs", "token_advantages")
        if getattr(batch, name) is not None
    }
    return replace(batch, **columns, loss_mask=None, offsets=offsets_of(batch.loss_lengths))


def test_the_gap_to_the_engine_is_that_of_the_sampled_tokens_and_the_worst_token_is_at_its_place():
    batch = train_batch(*trajectories(seed=2), settings(), CPU)
    assert batch.loss_mask is not None
    by_trainer = batch.rollout_logprobs + 0.3 * torch.cos(torch.arange(len(batch.tokens)).float())
    sequence = next(s for s, ends in enumerate(batch.turn_ends()) if len(ends) > 1 and s != 1)
    place = batch.turn_ends()[sequence][1]  # behind observed tokens
    by_trainer[int(batch.offsets[sequence]) + place] -= 9
    computed = torch.arange(len(batch)) != 1
    metrics, worst = gap_to_rollout(batch, computed, by_trainer, CPU)
    expected, other = gap_to_rollout(without_observed(batch), computed, by_trainer[batch.loss_mask], CPU)
    assert metrics == expected
    assert worst is not None
    assert other is not None
    assert (worst.position, worst.length) == (place, int(batch.lengths[sequence]))
    assert (worst.token, worst.logprob) == (other.token, other.logprob)
    assert other.position < worst.position


def test_selections_compare_sampled_tokens_alone():
    batch = train_batch(*trajectories(seed=2), settings(GIGPO), CPU)
    assert batch.loss_mask is not None
    logprobs = -torch.rand(len(batch.tokens), generator=torch.Generator().manual_seed(0))
    seen = []

    def select(tokens):
        seen.append(tokens)
        return tokens.entropy_R > tokens.entropy_R.median()

    sequences = range(2, len(batch))
    found = select_tokens({"uncertain": select}, batch, sequences, (logprobs, -logprobs), CPU, 0)["uncertain"]
    short, mask = without_observed(batch), batch.loss_mask
    alone = (logprobs[mask], -logprobs[mask])
    expected = select_tokens({"uncertain": select}, short, sequences, alone, CPU, 0)["uncertain"]
    assert torch.equal(found[mask], expected)
    assert not found[~mask].any()
    assert all(torch.equal(a, b) for a, b in zip(*(vars(each).values() for each in seen), strict=True))


@pytest.mark.parametrize("estimator", ["opo", "reinforce_plus_plus", "optimal_token_baseline"])
def test_estimators_that_weigh_by_tokens_count_sampled_ones(estimator: str):
    config = settings(f"algorithm.advantage.name={estimator}")
    prompts, completions = trajectories(seed=2)
    rewards = environment_rewards(prompts, completions, turns=False)
    assert completions.loss_mask is not None
    mask = completions.loss_mask
    probs = None
    if estimator == "optimal_token_baseline":
        logprobs = -torch.rand(len(mask), generator=torch.Generator().manual_seed(0))
        probs = TokenProbs(logprobs, logprobs.exp().square())
    found, of_tokens = advantages_over_ranks(
        config.algorithm.advantage, config.reward.functions, completions, rewards, CPU, probs
    )
    tokens = {name: getattr(completions, name)[mask] for name in ("tokens", "logprobs")}
    short = replace(completions, **tokens, loss_mask=None, offsets=offsets_of(completions.loss_lengths))
    alone = None if probs is None else TokenProbs(probs.logprobs[mask], probs.square_sums[mask])
    expected, of_sampled = advantages_over_ranks(
        config.algorithm.advantage, config.reward.functions, short, rewards, CPU, alone
    )
    assert torch.equal(found, expected)
    assert found.any()
    if of_tokens is not None:
        assert of_sampled is not None
        assert torch.equal(of_tokens[mask], of_sampled)
        assert not of_tokens[~mask].any()


def test_lengths_count_all_tokens_and_sampled_ones_apart_and_advantages_are_of_sampled_ones():
    prompts, completions = trajectories(seed=2)
    config = settings(GIGPO)
    rewards = environment_rewards(prompts, completions, turns=True)
    functions = config.reward.functions
    advantages, of_tokens = advantages_over_ranks(config.algorithm.advantage, functions, completions, rewards, CPU)
    assert of_tokens is not None
    given = prompts, completions, rewards, advantages, CPU.gather_objects
    metrics = sample_metrics(*given, of_tokens)
    sampled = completions.loss_lengths.double()
    assert metrics["response_length/mean"] == pytest.approx(float(completions.lengths.double().mean()))
    assert metrics["response_length/sampled/mean"] == pytest.approx(float(sampled.mean()))
    assert metrics["response_length/sampled/mean"] < metrics["response_length/mean"]
    assert metrics["response_length/sampled/max"] == float(sampled.max())
    assert metrics["response_length/sampled/min"] == float(sampled.min())
    assert completions.loss_mask is not None
    assert metrics["critic/advantages/mean"] == pytest.approx(float(of_tokens[completions.loss_mask].double().mean()))
    everything = replace(completions, loss_mask=None, outcomes=())
    assert not any("sampled" in name for name in sample_metrics(prompts, everything, *given[2:], of_tokens))


def test_ranks_of_which_one_has_no_observed_tokens_count_its_responses_as_sampled():
    prompts, completions = trajectories(seed=2)
    rewards = environment_rewards(prompts, completions, turns=False)
    zeros = torch.zeros(len(completions))
    other: list = []
    sample_metrics(
        prompts, replace(completions, loss_mask=None), rewards, zeros, lambda own: other.append(own) or [own]
    )
    metrics = sample_metrics(prompts, completions, rewards, zeros, lambda own: [own, *other])
    both = torch.cat([completions.loss_lengths, completions.lengths]).double()
    assert metrics["response_length/sampled/mean"] == pytest.approx(float(both.mean()))


def responses(mask: list[list[bool]] | None, lengths: list[int]) -> Responses:
    flat = None if mask is None else torch.tensor([*itertools.chain(*mask)], dtype=torch.bool)
    total = sum(lengths)
    return Responses(
        torch.zeros(len(lengths), dtype=torch.int64),
        torch.zeros(total, dtype=torch.int64),
        offsets_of(torch.tensor(lengths)),
        torch.zeros(total),
        loss_mask=flat,
    )


def test_turns_end_with_the_last_token_of_each_run_of_sampled_tokens():
    mask = [[True, True, False, True], [], [True, False], [False, False], [True], [True, True], [False, True, False]]
    found = responses(mask, [len(each) for each in mask]).turn_ends()
    assert found == [[1, 3], [-1], [0], [-1], [0], [1], [1]]
    assert responses(None, [3, 0, 1]).turn_ends() == [[2], [-1], [0]]
    assert responses([], []).turn_ends() == []
