"""The sequences that a group of ranks computes together: gather them, and scatter the results back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hwgrpo.training.policy.micro_batch import TokenSignals
from hwgrpo.training.policy.sequence_group import SequenceGroup
from hwgrpo.values import TrainBatch


@dataclass(frozen=True)
class GroupBatch:
    """The sequences that a group of ranks computes together."""

    group: SequenceGroup
    batch: TrainBatch
    """The members' sequences, concatenated."""
    sequences: Sequence[int]
    """Indices of the sequences to compute."""
    signals: TokenSignals
    own_tokens: torch.Tensor
    """[r] int64: indices of this rank's response tokens in its own batch."""
    positions: torch.Tensor
    """[r] int64: indices of the same tokens in `batch`."""

    def scatter_back(self, values: torch.Tensor) -> torch.Tensor:
        """Return [r]: the values that the members computed for this rank's tokens.

        Args:
            values: [R], one per response token of `batch`; 0 where another member computed the value.
        """
        return self.group.sum(values)[self.positions]


def gather_group_batch(
    group: SequenceGroup, batch: TrainBatch, sequences: Sequence[int], signals: TokenSignals
) -> GroupBatch:
    """Gather the sequences that each member of a group needs computed.

    Args:
        group: this rank's group; a single rank keeps its batch.
        batch: this rank's sequences.
        sequences: indices of the sequences to compute.
        signals: signals of the full batch.
    """
    wanted = torch.zeros(len(batch), dtype=torch.bool)
    wanted[torch.tensor(list(sequences), dtype=torch.int64)] = True
    own_tokens = torch.repeat_interleave(wanted, batch.lengths).nonzero()[:, 0]
    if group.size == 1:
        return GroupBatch(group, batch, sequences, signals, own_tokens, own_tokens)
    parts = group.gather(_select(batch, wanted, own_tokens, signals))
    first = sum(len(part.tokens) for part, _ in parts[: group.rank])
    positions = torch.arange(first, first + len(own_tokens))
    joined = _concatenate([part for part, _ in parts])
    names = parts[0][1]
    group_signals = TokenSignals(
        per_sequence={name: torch.cat([s.per_sequence[name] for _, s in parts]) for name in names.per_sequence},
        per_token={name: torch.cat([s.per_token[name] for _, s in parts]) for name in names.per_token},
    )
    return GroupBatch(group, joined, range(len(joined)), group_signals, own_tokens, positions)


def _select(
    batch: TrainBatch, wanted: torch.Tensor, tokens: torch.Tensor, signals: TokenSignals
) -> tuple[TrainBatch, TokenSignals]:
    """Return all prompts and the `wanted` [S] sequences with their `tokens` [r], and their signals."""
    part = TrainBatch(
        prompt_tokens=batch.prompt_tokens,
        prompt_offsets=batch.prompt_offsets,
        prompt_index=batch.prompt_index[wanted],
        tokens=batch.tokens[tokens],
        offsets=_offsets([batch.lengths[wanted]]),
        advantages=batch.advantages[wanted],
        rollout_logprobs=batch.rollout_logprobs[tokens],
    )
    return part, TokenSignals(
        per_sequence={name: values[wanted] for name, values in signals.per_sequence.items()},
        per_token={name: values[tokens] for name, values in signals.per_token.items()},
    )


def _concatenate(parts: list[TrainBatch]) -> TrainBatch:
    """Concatenate batches without old and reference log-probs, which are in their signals."""
    indices, prompts = [], 0
    for part in parts:
        indices.append(part.prompt_index + prompts)
        prompts += len(part.prompt_offsets) - 1
    return TrainBatch(
        prompt_tokens=torch.cat([part.prompt_tokens for part in parts]),
        prompt_offsets=_offsets([part.prompt_offsets.diff() for part in parts]),
        prompt_index=torch.cat(indices),
        tokens=torch.cat([part.tokens for part in parts]),
        offsets=_offsets([part.lengths for part in parts]),
        advantages=torch.cat([part.advantages for part in parts]),
        rollout_logprobs=torch.cat([part.rollout_logprobs for part in parts]),
    )


def _offsets(lengths: list[torch.Tensor]) -> torch.Tensor:
    joined = torch.cat(lengths)
    return torch.cat([joined.new_zeros(1), joined.cumsum(0)])
