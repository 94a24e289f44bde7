"""The sequences of a micro-batch's rows: the input tokens that they share, and what attention separates them by."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch

from hwgrpo.models.shared_prefix_masks import Branches
from hwgrpo.training.policy.layouts import Layout, Rows
from hwgrpo.values import TrainBatch


class Members(NamedTuple):
    """The S sequences of B rows, row by row."""

    sequence_S: torch.Tensor
    """[S] int64."""
    row_S: torch.Tensor
    """[S] int64."""
    first_S: torch.Tensor
    """[S] bool: the first of its row."""
    prompt_S: torch.Tensor
    """[S] int64: number of tokens of its prompt that it feeds, 0 where the row's first sequence does."""
    input_S: torch.Tensor
    """[S] int64: input tokens of its response."""
    shared_S: torch.Tensor
    """[S] int64: how many of them the sequences before it in the row feed under a dense mask."""

    def widths(self, fed_S: torch.Tensor) -> list[int]:
        """Return the number of tokens of each row whose sequences feed `fed_S` [S] response tokens."""
        widths = torch.zeros(int(self.first_S.sum()), dtype=torch.int64)
        return widths.index_add(0, self.row_S, self.prompt_S + fed_S).tolist()


def row_members(batch: TrainBatch, rows: Rows, layout: Layout) -> Members:
    """Return the sequences of rows of a layout, in any order within a row; sorted ones share most tokens."""
    sequence_S = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)
    row_S = torch.repeat_interleave(torch.tensor([len(row) for row in rows], dtype=torch.int64))
    first_S = torch.ones(len(sequence_S), dtype=torch.bool)
    first_S[1:] = row_S.diff() > 0
    prompt_S = batch.prompt_offsets.diff()[batch.prompt_index[sequence_S]]
    input_S = (batch.lengths[sequence_S] - 1).clamp_min(0)
    if not (layout.shares_prompt and layout.is_dense(1)):
        own_S = torch.where(first_S | (not layout.shares_prompt), prompt_S, 0)
        return Members(sequence_S, row_S, first_S, own_S, input_S, torch.zeros_like(input_S))
    shared_S = _shared_tokens(batch, sequence_S, row_S)
    return Members(sequence_S, row_S, first_S, torch.where(first_S, prompt_S, 0), input_S, shared_S)


def _shared_tokens(batch: TrainBatch, sequence_S: torch.Tensor, row_S: torch.Tensor) -> torch.Tensor:
    """Return [S] int64: how many input tokens a response begins with that the one before it in its row has, too.

    Args:
        batch: the update's sequences.
        sequence_S: [S] int64 sequences, row by row; those of a row have one prompt.
        row_S: [S] int64 row of each.
    """
    input_S = (batch.lengths - 1).clamp_min(0)[sequence_S]
    shared_S = torch.zeros_like(input_S)
    shared_S[1:] = torch.where(row_S.diff() == 0, torch.minimum(input_S[1:], input_S[:-1]), 0)
    begin_S = batch.offsets[sequence_S]
    place, within, of = spread(begin_S, shared_S)
    differs = batch.tokens[place] != batch.tokens[begin_S[of - 1] + within]
    return shared_S.scatter_reduce(0, of[differs], within[differs], "amin")


def spread(start_S: torch.Tensor, length_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each element of the ranges of `length_S` from `start_S` on, its index in its range, and its range."""
    of = torch.repeat_interleave(length_S)
    within = torch.arange(len(of)) - (length_S.cumsum(0) - length_S)[of]
    return start_S[of] + within, within, of


def feeders(shared_S: torch.Tensor, of: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return [N] int64: the sequence that feeds the input token `at` [N] of the response of sequence `of` [N]."""
    longest = int(shared_S.max())
    owns = shared_S[:, None] <= torch.arange(longest + 1)
    feeder = torch.where(owns, torch.arange(len(shared_S))[:, None], 0).cummax(0).values
    return feeder[of, at.clamp_max(longest)]


def row_mask(positions: torch.Tensor, owner: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return [B, 1, L, L] bool: a token sees the tokens that its own sequence has, up to its own position."""
    visible = (owner[:, None, :] <= owner[:, :, None]) & (owner[:, :, None] <= last[:, None, :])
    return (visible & (positions[:, None, :] <= positions[:, :, None]))[:, None]


def row_branches(
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
    place, within, of = spread(row_S * width + response_S, input_S)
    responses = torch.zeros(B, K, R, dtype=torch.int64)
    responses[row_S[of], branch_S[of], within] = place
    # The prompt's tokens are in a row's first P columns; the others there are a response's, or padding.
    source = torch.arange(width).clamp_max(P - 1) + P * torch.arange(B)[:, None]
    source.view(-1)[place] = B * P + ((row_S * K + branch_S)[of] * R + within)
    return Branches(
        prompt_width=P, responses=responses, prompt_lengths=prompt_length_S[first_S], place=source.flatten()
    )
