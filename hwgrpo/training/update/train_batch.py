"""From sampled and scored responses to the TrainBatch of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.algorithms.token_advantages import TokenProbs, is_token_level, mean_over_tokens
from hwgrpo.config.schema import AdvantageConfig, RewardFunctionConfig
from hwgrpo.errors import DataError
from hwgrpo.ragged import offsets_of
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.values import EXTRA, Completions, PromptBatch, Responses, Rewards, TrainBatch, image_columns


def advantages_over_ranks(
    estimator: AdvantageConfig,
    functions: Sequence[RewardFunctionConfig],
    completions: Completions,
    rewards: Rewards,
    strategy: Strategy,
    probs: TokenProbs | None = None,
    kl_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute this rank's advantages with statistics over the groups and batches of all ranks.

    Groups never span ranks, but a batch does: estimators that scale by the whole batch must see all of it. Those that
    read `token_probs`, here `probs`, see this rank's groups only: two numbers per token of all ranks are too many.
    Those that read `kl_R` see it of all ranks, because they whiten over tokens. All see the tokens that carry loss.

    Returns:
        [S] fp32 per response, and [R] fp32 per token; None where all tokens have that of their response. Per response
        is otherwise the mean over its tokens that carry loss; the others have 0.
    """
    rank, gather = (strategy.rank, strategy.gather_objects) if probs is None else (0, lambda value: [value])
    per_token = is_token_level(estimator, kl_R is not None)
    own = replace(rewards, extras=(), failures={}, first_failures={})
    mask_R, lengths_S = completions.loss_mask, completions.loss_lengths
    if mask_R is not None:
        if rewards.steps is not None:
            own = replace(own, steps=rewards.steps.among(mask_R, completions.offsets))
        kl_R = None if kl_R is None else kl_R[mask_R]
        probs = None if probs is None else TokenProbs(probs.logprobs[mask_R], probs.square_sums[mask_R])
    ranks = gather((own, completions.prompt_index, lengths_S, kl_R if per_token else None))
    every = Rewards.concat([scored for scored, *_ in ranks])
    offset, groups = 0, []
    for _, index, *_ in ranks:
        groups.append(index + offset)
        offset += int(index.max()) + 1 if index.numel() else 0
    advantages = group_advantages(
        every.total,
        torch.cat(groups),
        every.valid,
        estimator,
        torch.cat([lengths for *_, lengths, _ in ranks]),
        {
            name: (function.weight, values)
            for (name, values), function in zip(every.per_function.items(), functions, strict=True)
        },
        every.steps,
        every.greedy,
        probs,
        torch.cat([kl for *_, kl in ranks]) if kl_R is not None and per_token else None,
    )
    if not per_token:
        return advantages.split([len(index) for _, index, *_ in ranks])[rank], None
    own_R = advantages.split([int(lengths.sum()) for *_, lengths, _ in ranks])[rank]
    per_response = mean_over_tokens(own_R, lengths_S)
    if mask_R is not None:
        own_R = torch.zeros(len(mask_R)).masked_scatter(mask_R, own_R)
    return per_response, own_R


def assemble(
    batch: PromptBatch,
    completions: Completions,
    advantages: torch.Tensor,
    valid: torch.Tensor,
    token_advantages: torch.Tensor | None = None,
    *,
    temperature: float | None = None,
) -> TrainBatch:
    """Build the batch to train on from prompts, responses and advantages, without invalid samples.

    Args:
        batch: G prompts.
        completions: S responses.
        advantages: [S] fp32.
        valid: [S] bool; False for samples removed by a reward's failure policy, the others of their group stay.
        token_advantages: [R] fp32; None: those of the responses.
        temperature: at which the responses were sampled; None: `rollout.temperature`.

    Returns:
        The batch with every prompt once and the valid sequences, ragged.
    """
    _check_added(completions)
    kept = completions.select(valid)
    columns: dict[str, Any] = {each.name: getattr(kept, each.name) for each in fields(Responses)}
    columns["token_extras"] = {name: x.float() for name, x in kept.token_extras.items() if x.ndim == 1}
    prompt_lengths = torch.tensor([len(p.token_ids) for p in batch.prompts], dtype=torch.int64)
    return TrainBatch(
        **columns,
        **image_columns(batch.prompts, shifted=kept.shifts is not None),
        prompt_tokens=torch.tensor([t for p in batch.prompts for t in p.token_ids], dtype=torch.int64),
        prompt_offsets=offsets_of(prompt_lengths),
        advantages=advantages[valid],
        token_advantages=None if token_advantages is None else token_advantages[completions.per_token_of(valid)],
        temperature=temperature,
    )


SAMPLE_SEQUENCES, SAMPLE_PROMPT_TOKENS, SAMPLE_RESPONSE_TOKENS = 4, 32, 32
"""Bounds of a short sample: 256 tokens in total."""


def short_sample(batch: TrainBatch, temperature: float) -> TrainBatch | None:
    """Return a few sequences of a batch, cut short, for a scoring pass that costs next to nothing.

    They are the first two and the last two responses, so that responses with and without a common prompt are among
    them: the last tokens of their prompts, of what follows images, and the first of the responses, all of which count
    as sampled.

    Args:
        batch: this rank's sequences.
        temperature: at which they are scored, where the batch has none of its own.

    Returns:
        The sample; None where the batch has no response with tokens.
    """
    filled = batch.lengths.nonzero()[:, 0].tolist()
    if not filled:
        return None
    half = SAMPLE_SEQUENCES // 2
    chosen = sorted({*filled[:half], *filled[-half:]})
    numbers, prompt_index = batch.prompt_index[chosen].unique(return_inverse=True)
    ends, starts = batch.prompt_offsets[numbers + 1], batch.prompt_offsets[numbers]
    after_images = [_after_images(batch, prompt) for prompt in numbers.tolist()]
    prompts = [
        batch.prompt_tokens[max(start + seen, end - SAMPLE_PROMPT_TOKENS) : end]
        for start, end, seen in zip(starts.tolist(), ends.tolist(), after_images, strict=True)
    ]
    bounds = batch.offsets.tolist()
    lasts = [min(bounds[s + 1], bounds[s] + SAMPLE_RESPONSE_TOKENS) for s in chosen]
    responses = [_before_images(batch, s, batch.tokens[bounds[s] : end]) for s, end in zip(chosen, lasts, strict=True)]
    tokens = torch.cat(responses)
    return TrainBatch(
        prompt_tokens=torch.cat(prompts),
        prompt_offsets=offsets_of(torch.tensor([len(prompt) for prompt in prompts])),
        prompt_index=prompt_index,
        tokens=tokens,
        offsets=offsets_of(torch.tensor([len(response) for response in responses])),
        advantages=torch.ones(len(chosen)),
        logprobs=torch.zeros(len(tokens)),
        temperature=temperature if batch.temperature is None else batch.temperature,
    )


def _before_images(batch: TrainBatch, sequence: int, tokens: torch.Tensor) -> torch.Tensor:
    """Return the first tokens of a response up to an image that is observed in it."""
    seen = batch.seen[sequence] if batch.seen else ()
    if not seen or not bool((places := tokens == seen[0].token_id).any()):
        return tokens
    return tokens[: int(places.nonzero()[0])]


def _after_images(batch: TrainBatch, prompt: int) -> int:
    """Return how many tokens of a prompt stand before and in its last image; 0 without images."""
    images = batch.images[prompt] if batch.images else None
    if images is None:
        return 0
    start, end = batch.prompt_offsets[prompt : prompt + 2].tolist()
    return int((batch.prompt_tokens[start:end] == images.token_id).nonzero().max()) + 1


def _check_added(completions: Completions) -> None:
    """Check what engines of one's own may add to responses.

    Raises:
        DataError: a value is not one per token, or the mask is not bool.
    """
    added = {f"token_extras[{name!r}]": values for name, values in completions.token_extras.items()}
    mask, tokens = completions.loss_mask, len(completions.tokens)
    for name, values in (added if mask is None else added | {"loss_mask": mask}).items():
        if len(values) != tokens:
            raise DataError(f"{name} of the engine's responses has {len(values)} values for {tokens} tokens")
    if mask is not None and mask.dtype != torch.bool:
        raise DataError(f"loss_mask of the engine's responses has dtype {mask.dtype}; it must be torch.bool")


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


def with_weights(batch: TrainBatch, sequences: Sequence[int], weights: torch.Tensor) -> TrainBatch:
    """Return the batch with the `weights` [len(sequences)] fp32 of every token of these sequences, of others 0."""
    weights_S = torch.zeros(len(batch))
    weights_S[torch.tensor(list(sequences), dtype=torch.int64)] = weights
    return replace(batch, weights=weights_S)


def loss_signals(batch: TrainBatch, *, rollout: bool) -> dict[str, str]:
    """Return the inputs of the loss per token, as far as the batch has them: name -> column of the batch.

    Args:
        batch: the step's sequences.
        rollout: whether the loss needs the rollout engine's log-probs.
    """
    signals = {
        "advantage": "advantages" if batch.token_advantages is None else "token_advantages",
        "weight": "weights",
        "old_logprob": "old_logprobs",
        "ref_logprob": "ref_logprobs",
        "logprob_floor": "floors",
    }
    if rollout:
        signals |= {"rollout_logprob": "logprobs", "rollout_share": "rollout_shares"}
    present = {name: column for name, column in signals.items() if getattr(batch, column) is not None}
    further = (*batch.selections, *(EXTRA + name for name in batch.token_extras))
    return present | {name: name for name in further}


def with_rollout_shares(batch: TrainBatch, completions: Completions, trained: torch.Tensor, step: int) -> TrainBatch:
    """Return the batch with the rollout's share in each token's old log-prob.

    The old policy is the one before the update, one version behind the policy in training: between the versions of the
    sampler and of that policy it has the place 1 - 1 / (their difference). Source: AReaL's `loglinear`.

    Args:
        batch: the step's sequences.
        completions: S responses.
        trained: [S] bool: those in `batch`.
        step: the step, whose update makes weights of this version.
    """
    versions_R = completions.versions
    if versions_R is None:
        versions_R = torch.full_like(completions.tokens, completions.weight_version)
    versions_R = versions_R[completions.per_token_of(trained)]
    return replace(batch, rollout_shares=1 / (step - versions_R).clamp(min=1).float())
