"""The sequences that a group of ranks computes together, put together and given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hwgrpo.training.policy.micro_batch import TokenSignals
from hwgrpo.training.policy.sequence_group import SequenceGroup
from hwgrpo.values import TrainBatch


@dataclass(frozen=True)
class GroupBatch:
    """The sequences that a group computes together."""

    group: SequenceGroup
    batch: TrainBatch
    sequences: Sequence[int]
    """Those of the batch that are computed."""
    signals: TokenSignals
    own_tokens: torch.Tensor
    """[r] int64: where the response tokens of the sequences that this rank brought stand in its own batch."""
    places: torch.Tensor
    """[r] int64: where they stand in the pool's."""

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Return [r]: what any member found for this rank's tokens.

        Args:
            values: [R] of the pool's response tokens; 0 where another member has found the value.
        """
        return self.group.sum(values)[self.places]


def gather_group_batch(
    group: SequenceGroup, batch: TrainBatch, sequences: Sequence[int], signals: TokenSignals
) -> GroupBatch:
    """Put together the sequences that each member of a group wants computed.

    Args:
        group: of this rank; a rank alone keeps its batch as it is.
        batch: this rank's.
        sequences: which of its sequences are computed.
        signals: of the whole batch.
    """
    wanted = torch.zeros(len(batch), dtype=torch.bool)
    wanted[torch.tensor(list(sequences), dtype=torch.int64)] = True
    own_tokens = torch.repeat_interleave(wanted, batch.lengths).nonzero()[:, 0]
    if group.size == 1:
        return GroupBatch(group, batch, sequences, signals, own_tokens, own_tokens)
    parts = group.gather(_cut_out(batch, wanted, own_tokens, signals))
    first = sum(len(part.tokens) for part, _ in parts[: group.rank])
    places = torch.arange(first, first + len(own_tokens))
    joined = _joined([part for part, _ in parts])
    names = parts[0][1]
    together = TokenSignals(
        per_sequence={name: torch.cat([s.per_sequence[name] for _, s in parts]) for name in names.per_sequence},
        per_token={name: torch.cat([s.per_token[name] for _, s in parts]) for name in names.per_token},
    )
    return GroupBatch(group, joined, range(len(joined)), together, own_tokens, places)


def _cut_out(
    batch: TrainBatch, wanted: torch.Tensor, tokens: torch.Tensor, signals: TokenSignals
) -> tuple[TrainBatch, TokenSignals]:
    """Return the `wanted` sequences [S] with their `tokens` [r], beside all prompts, and their signals."""
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


def _joined(parts: list[TrainBatch]) -> TrainBatch:
    """Put batches one behind the other; what only signals say of them (old log-probs) is left out."""
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
