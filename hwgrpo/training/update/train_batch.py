"""From sampled and scored responses to the TrainBatch of one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.algorithms.token_advantages import TokenProbs, is_token_level, mean_over_tokens
from hwgrpo.config import Config
from hwgrpo.step_rewards import join_steps
from hwgrpo.training.policy.micro_batch import TokenSignals
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.values import Completions, PromptBatch, Rewards, TrainBatch


def advantages_over_ranks(
    config: Config,
    completions: Completions,
    rewards: Rewards,
    strategy: Strategy,
    probs: TokenProbs | None = None,
    kl_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute this rank's advantages with statistics over the groups and batches of all ranks.

    Groups never span ranks, but a batch does: estimators that scale by the whole batch must see all of it. Those that
    read `token_probs`, here `probs`, see this rank's groups only: two numbers per token of all ranks are too many.
    Those that read `kl_R` see it of all ranks, because they whiten over tokens.

    Returns:
        [S] fp32 per response, and [R] fp32 per token; None where all tokens have that of their response. Per response
        is otherwise the mean over its tokens.
    """
    group = completions.prompt_index
    rank, gather = (strategy.rank, strategy.gather_objects) if probs is None else (0, lambda value: [value])
    ranks = gather((rewards.total, group, rewards.valid, completions.lengths, rewards.per_function))
    offset, groups = 0, []
    for _, index, *_ in ranks:
        groups.append(index + offset)
        offset += int(index.max()) + 1 if index.numel() else 0
    per_token = is_token_level(config.algorithm.advantage, kl_R is not None)
    advantages = group_advantages(
        torch.cat([total for total, *_ in ranks]),
        torch.cat(groups),
        torch.cat([valid for _, _, valid, *_ in ranks]),
        config.algorithm.advantage,
        torch.cat([lengths for *_, lengths, _ in ranks]),
        {
            name: (function.weight, torch.cat([parts[name] for *_, parts in ranks]))
            for name, function in zip(rewards.per_function, config.reward.functions, strict=True)
        },
        None if rewards.steps is None else join_steps(gather(rewards.steps)),
        None if rewards.greedy is None else torch.cat(gather(rewards.greedy)),
        probs,
        torch.cat(gather(kl_R)) if kl_R is not None and per_token else None,
    )
    if not per_token:
        return advantages.split([len(index) for _, index, *_ in ranks])[rank], None
    own = advantages.split([int(lengths.sum()) for *_, lengths, _ in ranks])[rank]
    return mean_over_tokens(own, completions.lengths), own


def assemble(
    batch: PromptBatch,
    completions: Completions,
    advantages: torch.Tensor,
    valid: torch.Tensor,
    token_advantages: torch.Tensor | None = None,
) -> TrainBatch:
    """Build the batch to train on from prompts, responses and advantages, without invalid samples.

    Args:
        batch: G prompts.
        completions: S responses.
        advantages: [S] fp32.
        valid: [S] bool; False for samples removed by a reward's failure policy, the others of their group stay.
        token_advantages: [R] fp32; None: those of the responses.

    Returns:
        The batch with every prompt once and the valid sequences, ragged.
    """
    lengths = completions.lengths
    token_valid = torch.repeat_interleave(valid, lengths)
    kept = lengths[valid]
    prompt_lengths = torch.tensor([len(p.token_ids) for p in batch.prompts], dtype=torch.int64)
    return TrainBatch(
        prompt_tokens=torch.tensor([t for p in batch.prompts for t in p.token_ids], dtype=torch.int64),
        prompt_offsets=_offsets(prompt_lengths),
        prompt_index=completions.prompt_index[valid],
        tokens=completions.tokens[token_valid],
        offsets=_offsets(kept),
        advantages=advantages[valid],
        rollout_logprobs=completions.logprobs[token_valid],
        floors=None if completions.floors is None else completions.floors[token_valid],
        token_advantages=None if token_advantages is None else token_advantages[token_valid],
    )


def split_updates(batch: TrainBatch, prompts: int, prompts_per_update: int) -> list[list[int]]:
    """Split a step's sequences into optimizer updates of `prompts_per_update` prompts each, in order.

    Args:
        batch: the step's sequences on this rank.
        prompts: prompts of the step on this rank (also those whose samples are all invalid).
        prompts_per_update: prompts per update on this rank; divides `prompts`.

    Returns:
        For each update the indices of its sequences; an update may be empty on this rank.
    """
    update_of = (batch.prompt_index // prompts_per_update).tolist()
    updates: list[list[int]] = [[] for _ in range(prompts // prompts_per_update)]
    for sequence, update in enumerate(update_of):
        updates[update].append(sequence)
    return updates


def token_signals(batch: TrainBatch, sequences: Sequence[int], weights: torch.Tensor, rollout: bool) -> TokenSignals:
    """Return the loss's inputs per sequence and per token.

    Args:
        batch: the step's sequences.
        sequences: indices of this update's sequences.
        weights: [len(sequences)] fp32: weight of every token of a sequence.
        rollout: whether the loss needs the rollout engine's log-probs.
    """
    weight = torch.zeros(len(batch))
    weight[torch.tensor(list(sequences), dtype=torch.int64)] = weights
    per_token: dict[str, torch.Tensor | None]
    per_token = {"old_logprob": batch.old_logprobs, "ref_logprob": batch.ref_logprobs, "logprob_floor": batch.floors}
    if rollout:
        per_token |= {"rollout_logprob": batch.rollout_logprobs, "rollout_share": batch.rollout_shares}
    per_sequence = {"advantage": batch.advantages, "weight": weight}
    if batch.token_advantages is not None:
        del per_sequence["advantage"]
        per_token["advantage"] = batch.token_advantages
    return TokenSignals(
        per_sequence=per_sequence,
        per_token={name: tensor for name, tensor in per_token.items() if tensor is not None},
    )


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
