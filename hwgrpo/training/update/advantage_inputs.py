"""What advantages are computed from: rewards, shuffled or less the KL, and probabilities that estimators read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import torch

from hwgrpo.algorithms.kl import build_kl
from hwgrpo.algorithms.scope import sequence_sum
from hwgrpo.algorithms.token_advantages import TokenProbs, takes
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.train_batch import assemble
from hwgrpo.values import Completions, PromptBatch, Rewards, TrainBatch


@dataclass(frozen=True)
class AdvantageInputs:
    """What advantages are computed from, and old log-probs that were computed on the way."""

    rewards: Rewards
    """The step's, less the KL where that is in the reward."""
    token_probs: TokenProbs | None = None
    """Of the tokens of all responses, 0 where one is invalid; None where the estimator does not read them."""
    kl_R: torch.Tensor | None = None
    """[R] fp64: the KL in the reward, times its coefficient, of the tokens of all responses, 0 where one is invalid;
    None without it."""
    old_logprobs: torch.Tensor | None = None
    """[R] fp32, of the valid responses' tokens; None where the update needs none or they were not computed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Those of `penalize`."""

    def add_old_logprobs(self, batch: TrainBatch, trained: torch.Tensor, lengths: torch.Tensor) -> TrainBatch:
        """Return the batch with the old log-probs computed here, if there are any.

        Args:
            batch: the responses that are trained.
            trained: [S] bool: those of all responses that are in `batch`; each is valid.
            lengths: [S] tokens of all responses.
        """
        if self.old_logprobs is None:
            return batch
        valid = self.rewards.valid
        kept_R = trained[valid].repeat_interleave(lengths[valid])
        return replace(batch, old_logprobs=self.old_logprobs[kept_R])


def advantage_inputs(
    update: PolicyUpdate,
    reference: Reference | None,
    prompts: PromptBatch,
    completions: Completions,
    rewards: Rewards,
    watch: Stopwatch,
    temperature: float | None = None,
) -> AdvantageInputs:
    """Score responses with old policy and reference as far as their advantages need it.

    One pass of the old policy gives probabilities for the estimator, old log-probs for the KL in the reward, and those
    of the update where it needs them.

    Args:
        update: has the policy and the settings.
        reference: the reference model, or None.
        prompts: this rank's prompts.
        completions: their responses.
        rewards: their rewards.
        watch: times the stages `old_log_prob` and `ref`.
        temperature: as for `assemble`.
    """
    algorithm, valid = update.config.algorithm, rewards.valid
    penalizing = reference if algorithm.kl.in_reward else None
    reads_probs = takes(algorithm.advantage, "token_probs")
    if penalizing is None and not reads_probs:
        return AdvantageInputs(rewards)
    batch = assemble(prompts, completions, torch.zeros(len(valid)), valid, temperature=temperature)
    from_rollout = algorithm.old_logprobs == "rollout"
    old_R, token_probs, kl_R, metrics = batch.rollout_logprobs, None, None, {}
    squares_R = torch.zeros(len(batch.tokens))
    with watch("old_log_prob"):
        if reads_probs or not from_rollout:
            scored_R = update.score(batch, square_sums=squares_R if reads_probs else None)
            old_R = old_R if from_rollout else scored_R
            if reads_probs:
                token_probs = TokenProbs(*(_of_all(each, valid, completions.lengths) for each in (scored_R, squares_R)))
    if penalizing is not None:
        rewards, kl_of_valid, metrics = penalize(update, penalizing, batch, rewards, old_R, watch)
        kl_R = _of_all(kl_of_valid, valid, completions.lengths)
    return AdvantageInputs(rewards, token_probs, kl_R, old_R if update.needs_old_logprobs else None, metrics)


def _of_all(values: torch.Tensor, valid: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Spread values of the valid responses' tokens over those of all responses, 0 elsewhere."""
    valid_R = torch.repeat_interleave(valid, lengths)
    return values.new_zeros(len(valid_R)).masked_scatter(valid_R, values)


def penalize(
    update: PolicyUpdate,
    reference: Reference,
    batch: TrainBatch,
    rewards: Rewards,
    old_R: torch.Tensor,
    watch: Stopwatch,
) -> tuple[Rewards, torch.Tensor, dict[str, float]]:
    """Subtract the KL of old policy and reference from a step's rewards, then adapt its coefficient.

    As verl's `apply_kl_penalty`, whose token-level rewards GRPO sums over the response.

    Args:
        update: has the policy and the coefficient.
        reference: the reference model.
        batch: this rank's valid responses.
        rewards: of all its responses.
        old_R: [R] fp32, the batch's old log-probs.
        watch: times the stage `ref`.

    Returns:
        The rewards, with `total` less the coefficient times the KL summed over the response's tokens; [R] fp64 that
        product of each token of the batch; and `actor/reward_kl_*` and `critic/rewards/*`, over all ranks.
    """
    strategy, coef, valid = update.strategy, update.coefficients.kl, rewards.valid
    with watch("ref"), reference.active():
        ref_R = update.score(batch, reference.policy)
    kl_R = build_kl(update.config.algorithm.kl)(old_R.double(), ref_R.double())
    if batch.loss_mask is not None:
        kl_R = kl_R.where(batch.loss_mask, 0.0)
    kl_S = sequence_sum(kl_R, batch.offsets)[0]
    total_S = rewards.total.clone()
    total_S[valid] -= coef * kl_S
    means, responses = strategy.sum([float((kl_S / batch.loss_lengths.clamp(min=1)).sum()), len(batch)])
    kl = means / max(responses, 1)
    update.coefficients.follow_kl(kl, responses)
    metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coef}
    totals = torch.cat(strategy.gather_objects(total_S[valid]))
    if len(totals):
        ends = (("mean", totals.mean()), ("max", totals.max()), ("min", totals.min()))
        metrics |= {f"critic/rewards/{name}": float(value) for name, value in ends}
    return replace(rewards, total=total_S), coef * kl_R, metrics


def shuffle_rewards(rewards: Rewards, seed: int, step: int, rank: int) -> Rewards:
    """Permute the rewards of the valid samples: a control run keeps their mean and loses their signal.

    The permutation is a function of its arguments, so a resumed control run repeats it.
    """
    return _permute(rewards, (seed * 1_000_003 + step) * 1_009 + rank)


def shuffle_group(rewards: Rewards, seed: int, uid: str) -> Rewards:
    """Permute the rewards of a group's valid samples, the same way on any number of ranks and after a resume.

    Args:
        rewards: of the samples of one prompt.
        seed: the run's seed.
        uid: the prompt's uid.
    """
    return _permute(rewards, int.from_bytes(hashlib.sha256(f"{seed} {uid}".encode()).digest()[:7]))


def _permute(rewards: Rewards, seed: int) -> Rewards:
    generator = torch.Generator().manual_seed(seed)
    indices = rewards.valid.nonzero()[:, 0]
    order = torch.arange(len(rewards.total))
    order[indices] = indices[torch.randperm(len(indices), generator=generator)]
    parts = {name: values[order] for name, values in rewards.per_function.items()}
    return replace(rewards, total=rewards.total[order], per_function=parts)
