"""Micro-batches: the split of an update into them, and the input of one forward pass from the rows of a layout.

Only hidden states that predict response tokens reach the LM head. A response's last token is not an input. Where a
prompt is shared under a dense mask, so are the tokens with which its responses begin: their hidden states are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hwgrpo.models.shared_prefix_masks import Branches
from hwgrpo.models.ulysses_attention import all_to_all
from hwgrpo.ragged import offsets_of
from hwgrpo.training.policy.layouts import Layout, Rows, input_lengths
from hwgrpo.training.policy.row_members import feeders, row_branches, row_mask, row_members, spread
from hwgrpo.values import TrainBatch


def split_micro_batches(
    batch: TrainBatch, sequences: Sequence[int], budget: int, layout: Layout, hidden_size: int
) -> list[Rows]:
    """Split sequences into micro-batches of at most `budget` tokens, padding included; group rows of similar length.

    Args:
        batch: the update's sequences.
        sequences: indices of the sequences; those without tokens that carry loss are skipped (they have no gradient).
        budget: tokens per micro-batch, prompt and response.
        layout: forms the rows.
        hidden_size: the model's; layouts weigh attention against matrix products with it.

    Returns:
        Rows per micro-batch. A row longer than the budget is alone in its micro-batch.
    """
    filled = batch.loss_lengths.gt(0).tolist()
    lengths = input_lengths(batch).tolist()
    prompts = batch.prompt_offsets.diff()[batch.prompt_index].tolist()

    def length(row: list[int]) -> int:
        # tokens with which responses begin alike count for each: the LM head has all of them
        repeated = prompts[row[0]] * (len(row) - 1) if layout.shares_prompt else 0
        return sum(lengths[s] for s in row) - repeated

    rows = layout.rows(batch, [s for s in sequences if filled[s]], budget, hidden_size)
    parts: list[Rows] = []
    longest = 0
    for width, row in sorted(((length(row), row) for row in rows), key=lambda item: (-item[0], item[1])):
        if not parts or (len(parts[-1]) + 1) * longest > budget:
            parts.append([])
            longest = width
        parts[-1].append(row)
    return parts


@dataclass(frozen=True)
class SequenceShard:
    """The exchange from a rank's [B * L / S] hidden states, its columns of all rows, to those of its own losses."""

    group: Any
    """The process group."""
    size: int
    """S, its number of ranks."""
    tensor: bool
    """Tensor parallelism: layers are sharded over the ranks and gather all tokens themselves."""
    total: int
    """Response tokens of the micro-batch, over all ranks of the group."""
    rows: torch.Tensor
    """[M] int64: indices of the hidden states to send, in the order of receivers, this rank included."""
    send: tuple[int, ...]
    """Number of hidden states for each rank; M in total."""
    receive: tuple[int, ...]
    """Number of hidden states from each rank; N in total."""
    order: torch.Tensor
    """[N] int64: index of each response token's hidden state among the received ones."""

    def to(self, device: torch.device) -> SequenceShard:
        """Return the same on `device`."""
        return replace(self, rows=self.rows.to(device), order=self.order.to(device))

    def own(self, hidden: torch.Tensor) -> torch.Tensor:
        """Exchange hidden states [B * L / S, H]; return those that predict this rank's response tokens [N, H]."""
        return all_to_all(hidden[self.rows], self.send, self.receive, self.group)[self.order]


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass: B rows of L tokens, N response tokens of S sequences."""

    input_ids: torch.Tensor
    """[B, L] int64."""
    position_ids: torch.Tensor
    """[B, L] int64: position within the sequence."""
    is_token: torch.Tensor
    """[B, L] bool: False at padding."""
    attention_mask: torch.Tensor | None
    """[B, 1, L, L] bool (True: may attend); None for plain causal attention or with `branches`."""
    branches: Branches | None
    """Positions of prompts and responses, for shared-prefix attention without a mask over the row."""
    hidden_rows: torch.Tensor
    """[N] int64: index in the flattened [B * L] hidden states of the one that predicts each response token."""
    targets: torch.Tensor
    """[N] int64: the response tokens that carry loss."""
    cu_seqlens: torch.Tensor
    """[S + 1] int64: bounds of the sequences among the N rows."""
    token_index: torch.Tensor
    """[N] int64: index of each response token in the TrainBatch's [R] arrays."""
    signals: Mapping[str, torch.Tensor]
    """name -> [N] fp32: inputs of the loss per token (advantage, weight, old_logprob, ...)."""
    shard: SequenceShard | None = None
    """Set if a group of ranks shares the rows: `input_ids`, `position_ids` and `is_token` are then this rank's
    [B, L / S], N counts the response tokens whose loss it computes; mask, branches, `hidden_rows` cover full rows."""
    temperature: float | None = None
    """Of the log-probs; None: the policy's."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same micro-batch on `device`."""
        if self.input_ids.device == device:
            return self
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            is_token=self.is_token.to(device),
            attention_mask=None if self.attention_mask is None else self.attention_mask.to(device),
            branches=None if self.branches is None else self.branches.to(device),
            hidden_rows=self.hidden_rows.to(device),
            targets=self.targets.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            signals={name: tensor.to(device) for name, tensor in self.signals.items()},
            shard=None if self.shard is None else self.shard.to(device),
        )


def build_micro_batch(
    batch: TrainBatch, rows: Rows, signals: Mapping[str, str], layout: Layout, multiple: int = 1
) -> MicroBatch:
    """Build a micro-batch from rows of sequences.

    Args:
        batch: the update's sequences.
        rows: B rows of sequence indices; no rows give one row of one token and N = 0.
        signals: inputs of the loss per token: name -> column of the batch, [R] fp32 or [S] fp32, repeated over tokens.
        layout: layout of the rows; if it shares prompts, the sequences of a row must have the same prompt.
        multiple: divisor of the width L, padding included.
    """
    sequence_S, row_S, first_S, own_prompt_S, input_S, shared_S = members = row_members(batch, rows, layout)
    prompt_S = batch.prompt_index[sequence_S]
    prompt_length_S = batch.prompt_offsets.diff()[prompt_S]
    length_S = batch.lengths[sequence_S]

    width = max(members.widths(input_S - shared_S), default=1)
    dense = layout.is_dense(width)
    if not dense:
        shared_S = torch.zeros_like(shared_S)
        width = max(members.widths(input_S), default=1)
    fed_S = input_S - shared_S
    end_S = (own_prompt_S + fed_S).cumsum(0)
    begin_S = end_S - own_prompt_S - fed_S
    column_S = begin_S - begin_S[first_S][row_S]  # column of the sequence's first own token
    width = -(-width // multiple) * multiple
    prompt_end_S = prompt_length_S if layout.shares_prompt else column_S + prompt_length_S
    # column of the first response token, were it the sequence's own
    response_S = column_S + own_prompt_S - shared_S

    input_ids = torch.zeros(max(len(rows), 1), width, dtype=torch.int64)
    positions = torch.zeros_like(input_ids)
    # Numbers of the first and last sequence that have the token, as all between them do: 0 to S for a shared prompt, -1
    # for padding.
    owner = torch.full_like(input_ids, -1)
    last = torch.full_like(input_ids, -1)
    number_S = torch.arange(1, len(sequence_S) + 1)
    place, within, of = spread(row_S * width + column_S, own_prompt_S)
    input_ids.view(-1)[place] = batch.prompt_tokens[batch.prompt_offsets[prompt_S][of] + within]
    positions.view(-1)[place] = within
    owner.view(-1)[place] = 0 if layout.shares_prompt else number_S[of]
    last.view(-1)[place] = len(sequence_S) if layout.shares_prompt else number_S[of]
    place, within, of = spread(row_S * width + response_S + shared_S, fed_S)
    within += shared_S[of]
    input_ids.view(-1)[place] = batch.tokens[batch.offsets[sequence_S][of] + within]
    positions.view(-1)[place] = prompt_length_S[of] + within
    owner.view(-1)[place] = number_S[of]
    token_index, within, of = spread(batch.offsets[sequence_S], length_S)
    before = (within - 1).clamp_min(0)
    feeder = feeders(shared_S, of, before) if shared_S.any() else of
    place = row_S[of] * width + response_S[feeder] + before
    last.view(-1).scatter_reduce_(0, place[within > 0], number_S[of[within > 0]], "amax")
    if batch.loss_mask is not None:
        kept = batch.loss_mask[token_index]
        token_index, within, of, place = token_index[kept], within[kept], of[kept], place[kept]

    def at_rows(column: str) -> torch.Tensor:
        values, per_token = batch.column(column)
        return values[token_index] if per_token else values[sequence_S][of]

    masked = len(sequence_S) > len(rows)
    if not masked:
        # Positions that fall back to 0 at padding would make transformers build a mask for packed sequences.
        positions = torch.arange(width).expand(input_ids.shape)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=positions,
        is_token=owner >= 0,
        attention_mask=row_mask(positions, owner, last) if masked and dense else None,
        branches=row_branches(row_S, first_S, prompt_length_S, response_S, input_S, width)
        if masked and not dense
        else None,
        hidden_rows=torch.where(within > 0, place, row_S[of] * width + prompt_end_S[of] - 1),
        targets=batch.tokens[token_index],
        cu_seqlens=offsets_of(batch.loss_lengths[sequence_S]),
        token_index=token_index,
        signals={name: at_rows(column) for name, column in signals.items()},
        temperature=batch.temperature,
    )
