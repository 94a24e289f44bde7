"""Passes before advantages are computed: the KL in the reward, and probabilities that estimators read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from hwgrpo.algorithms.token_advantages import TokenProbs, takes
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.reward_kl import penalize
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
