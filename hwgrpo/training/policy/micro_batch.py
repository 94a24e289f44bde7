"""Micro-batches: the split of an update into them, and the input of one forward pass from the rows of a layout.

Only hidden states that predict response tokens reach the LM head. A response's last token is not an input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from hwgrpo.models.shared_prefix_masks import Branches
from hwgrpo.models.ulysses_attention import all_to_all
from hwgrpo.training.policy.layouts import Layout, Rows, input_lengths
from hwgrpo.values import TrainBatch


def split_micro_batches(
    batch: TrainBatch, sequences: Sequence[int], budget: int, layout: Layout, hidden_size: int
) -> list[Rows]:
    """Split sequences into micro-batches of at most `budget` tokens, padding included; group rows of similar length.

    Args:
        batch: the update's sequences.
        sequences: indices of the sequences; those without response tokens are skipped (they have no gradient).
        budget: tokens per micro-batch, prompt and response.
        layout: forms the rows.
        hidden_size: the model's; layouts weigh attention against matrix products with it.

    Returns:
        Rows per micro-batch. A row longer than the budget is alone in its micro-batch.
    """
    filled = batch.lengths.gt(0).tolist()
    lengths = input_lengths(batch).tolist()
    prompts = batch.prompt_offsets.diff()[batch.prompt_index].tolist()

    def length(row: list[int]) -> int:
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
    """[N] int64: the response tokens."""
    cu_seqlens: torch.Tensor
    """[S + 1] int64: bounds of the sequences among the N rows."""
    token_index: torch.Tensor
    """[N] int64: index of each response token in the TrainBatch's [R] arrays."""
    signals: Mapping[str, torch.Tensor]
    """name -> [N] fp32: inputs of the loss per token (advantage, weight, old_logprob, ...)."""
    shard: SequenceShard | None = None
    """Set if a group of ranks shares the rows: `input_ids`, `position_ids` and `is_token` are then this rank's
    [B, L / S], N counts the response tokens whose loss it computes; mask, branches, `hidden_rows` cover full rows."""

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


@dataclass(frozen=True)
class TokenSignals:
    """Signals of a full TrainBatch: per sequence and per response token."""

    per_sequence: Mapping[str, torch.Tensor]
    """name -> [S] fp32, repeated over a sequence's tokens."""
    per_token: Mapping[str, torch.Tensor]
    """name -> [R] fp32."""


def build_micro_batch(
    batch: TrainBatch, rows: Rows, signals: TokenSignals, layout: Layout, multiple: int = 1
) -> MicroBatch:
    """Build a micro-batch from rows of sequences.

    Args:
        batch: the update's sequences.
        rows: B rows of sequence indices; no rows give one row of one token and N = 0.
        signals: inputs of the loss per token.
        layout: layout of the rows; if it shares prompts, the sequences of a row must have the same prompt.
        multiple: divisor of the width L, padding included.
    """
    sequence_S = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)
    row_S = torch.repeat_interleave(torch.tensor([len(row) for row in rows], dtype=torch.int64))
    prompt_S = batch.prompt_index[sequence_S]
    prompt_length_S = batch.prompt_offsets.diff()[prompt_S]
    length_S = batch.lengths[sequence_S]
    input_S = (length_S - 1).clamp_min(0)

    first_S = torch.ones(len(sequence_S), dtype=torch.bool)
    first_S[1:] = row_S.diff() > 0
    own_prompt_S = torch.where(first_S | (not layout.shares_prompt), prompt_length_S, 0)
    end_S = (own_prompt_S + input_S).cumsum(0)
    begin_S = end_S - own_prompt_S - input_S
    column_S = begin_S - begin_S[first_S][row_S]  # column of the sequence's first own token
    width = int((column_S + own_prompt_S + input_S).max()) if rows else 1
    width = -(-width // multiple) * multiple
    prompt_end_S = prompt_length_S if layout.shares_prompt else column_S + prompt_length_S
    response_S = column_S + own_prompt_S

    input_ids = torch.zeros(max(len(rows), 1), width, dtype=torch.int64)
    positions = torch.zeros_like(input_ids)
    # Number of the token's sequence; 0 for a shared prompt, -1 for padding.
    owner = torch.full_like(input_ids, -1)
    number_S = torch.arange(1, len(sequence_S) + 1)
    place, within, of = _spread(row_S * width + column_S, own_prompt_S)
    input_ids.view(-1)[place] = batch.prompt_tokens[batch.prompt_offsets[prompt_S][of] + within]
    positions.view(-1)[place] = within
    owner.view(-1)[place] = 0 if layout.shares_prompt else number_S[of]
    place, within, of = _spread(row_S * width + response_S, input_S)
    input_ids.view(-1)[place] = batch.tokens[batch.offsets[sequence_S][of] + within]
    positions.view(-1)[place] = prompt_length_S[of] + within
    owner.view(-1)[place] = number_S[of]

    masked = len(sequence_S) > len(rows)
    if not masked:
        # Positions that fall back to 0 at padding would make transformers build a mask for packed sequences.
        positions = torch.arange(width).expand(input_ids.shape)
    dense = layout.attention == "masked" or width <= layout.dense_up_to
    token_index, within, of = _spread(batch.offsets[sequence_S], length_S)
    predicted_from = torch.where(within == 0, prompt_end_S[of], response_S[of] + within)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=positions,
        is_token=owner >= 0,
        attention_mask=_mask(positions, owner) if masked and dense else None,
        branches=_branches(row_S, first_S, prompt_length_S, response_S, input_S, width)
        if masked and not dense
        else None,
        hidden_rows=row_S[of] * width + predicted_from - 1,
        targets=batch.tokens[token_index],
        cu_seqlens=torch.cat([length_S.new_zeros(1), length_S.cumsum(0)]),
        token_index=token_index,
        signals={name: tensor[sequence_S][of] for name, tensor in signals.per_sequence.items()}
        | {name: tensor[token_index] for name, tensor in signals.per_token.items()},
    )


def _mask(positions: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Return [B, 1, L, L] bool: a token sees its own sequence and a shared prompt, up to its own position."""
    visible = (owner[:, None, :] == owner[:, :, None]) | (owner[:, None, :] == 0)
    return (visible & (positions[:, None, :] <= positions[:, :, None]))[:, None]


def _branches(
    row_S: torch.Tensor,
    first_S: torch.Tensor,
    prompt_length_S: torch.Tensor,
    response_S: torch.Tensor,
    input_S: torch.Tensor,
    width: int,
) -> Branches:
    """Return the branches of rows of `width` tokens with a shared prompt; `response_S`: first column of a response."""
    numbers = torch.arange(len(row_S))
    branch_S = numbers - numbers[first_S][row_S]
    B, K, P, R = int(row_S[-1]) + 1, int(branch_S.max()) + 1, int(prompt_length_S.max()), int(input_S.max())
    place, within, of = _spread(row_S * width + response_S, input_S)
    responses = torch.zeros(B, K, R, dtype=torch.int64)
    responses[row_S[of], branch_S[of], within] = place
    # The prompt's tokens are in a row's first P columns; the others there are a response's, or padding.
    source = torch.arange(width).clamp_max(P - 1) + P * torch.arange(B)[:, None]
    source.view(-1)[place] = B * P + ((row_S * K + branch_S)[of] * R + within)
    return Branches(
        prompt_width=P, responses=responses, prompt_lengths=prompt_length_S[first_S], place=source.flatten()
    )


def _spread(start_S: torch.Tensor, length_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each element of the ranges of `length_S` from `start_S` on, its index in its range, and its range."""
    of = torch.repeat_interleave(length_S)
    within = torch.arange(len(of)) - (length_S.cumsum(0) - length_S)[of]
    return start_S[of] + within, within, of
