"""The layouts `padded`, `packed` and `grouped`: which sequences share a row. The loss does not depend on the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from hwgrpo.values import TrainBatch

Rows = list[list[int]]
"""Sequence indices, row by row."""


@dataclass(frozen=True)
class Layout:
    """Which sequences share a row, and whether they share their prompt."""

    name: str
    rows: Callable[[TrainBatch, Sequence[int], int, int], Rows]
    """(batch, sequences, budget in tokens, hidden size) -> rows; only a single sequence may exceed the budget."""
    shares_prompt: bool
    """A row has the prompt once, followed by its responses; otherwise each response follows its own copy."""
    attention: Literal["masked", "branched"] = "masked"
    """How attention separates the sequences of a row: by a mask, or by attention that knows where they are, which
    replaces the model's (`hwgrpo.models.shared_prefix_masks`)."""
    dense_up_to: int = 0
    """Rows of at most this many tokens use a dense mask in any case."""

    def is_dense(self, width: int) -> bool:
        """Return whether a mask over a row of `width` tokens, shared ones counted once, separates its sequences."""
        return self.attention == "masked" or width <= self.dense_up_to


def _padded_rows(batch: TrainBatch, sequences: Sequence[int], budget: int, hidden_size: int) -> Rows:
    return [[s] for s in sequences]


def _packed_rows(batch: TrainBatch, sequences: Sequence[int], budget: int, hidden_size: int) -> Rows:
    # Under a dense mask a token's attention costs 2 T H, its matrix products 12 H^2: no row needs to be longer.
    return _filled_rows(batch, sequences, min(budget, 6 * hidden_size), hidden_size)


def _filled_rows(batch: TrainBatch, sequences: Sequence[int], longest: int, hidden_size: int) -> Rows:
    lengths = input_lengths(batch).tolist()
    rows: Rows = []
    filled = 0
    for s in sorted(sequences, key=lambda s: (-lengths[s], s)):
        if not rows or filled + lengths[s] > longest:
            rows.append([])
            filled = 0
        rows[-1].append(s)
        filled += lengths[s]
    return rows


def _masked_group_rows(batch: TrainBatch, sequences: Sequence[int], budget: int, hidden_size: int) -> Rows:
    responses = (batch.lengths - 1).clamp_min(0).tolist()

    def at_most(prompt_length: int, members: list[int]) -> int:
        mean = sum(responses[s] for s in members) / len(members)
        return responses_per_row(prompt_length, mean, hidden_size)

    return _group_rows(batch, sequences, budget, at_most)


def _branched_group_rows(batch: TrainBatch, sequences: Sequence[int], budget: int, hidden_size: int) -> Rows:
    # Attention never crosses from one response to another, so more responses in a row cost nothing.
    return _group_rows(batch, sequences, budget, lambda prompt_length, members: len(members))


def _group_rows(
    batch: TrainBatch, sequences: Sequence[int], budget: int, at_most: Callable[[int, list[int]], int]
) -> Rows:
    """Form rows of one prompt each; `at_most(prompt length, its responses)` is the most responses in a row."""
    prompts = batch.prompt_offsets.diff().tolist()
    responses = (batch.lengths - 1).clamp_min(0).tolist()
    prompt_of = batch.prompt_index.tolist()
    offsets, tokens = batch.offsets.tolist(), batch.tokens.numpy().astype(">u4")
    groups: dict[int, list[int]] = {}
    for s in sequences:
        groups.setdefault(prompt_of[s], []).append(s)
    rows: Rows = []
    for prompt, members in groups.items():
        # responses that begin alike become neighbours, whose first tokens may be fed once (`_row_members`)
        members.sort(key=lambda s: tokens[offsets[s] : offsets[s + 1]].tobytes())
        length = prompts[prompt]
        most = at_most(length, members)
        filled = 0
        row: list[int] = []
        for s in members:
            if row and (len(row) == most or filled + responses[s] > budget):
                rows.append(row)
                row = []
            if not row:
                filled = length
            row.append(s)
            filled += responses[s]
        rows.append(row)
    return rows


def responses_per_row(prompt_length: float, response_length: float, hidden_size: int) -> int:
    """Return the best number of responses per copy of their prompt under a dense mask.

    A row of k responses has T = P + k R tokens. Per layer, a token's matrix products cost about 12 H^2 multiply-adds
    (four H x H projections and a feed-forward part twice that), its attention under a dense mask 2 T H. Work per
    response, (T + T^2 / 6H) / k, is least at k = sqrt(P (6H + P)) / R.

    Args:
        prompt_length: P, tokens.
        response_length: R, tokens on average.
        hidden_size: H.
    """
    best = (prompt_length * (6 * hidden_size + prompt_length)) ** 0.5 / max(response_length, 1)
    return max(1, round(best))


MERGE_COST = 100.0
"""What a token of a grouped row costs more than one of a packed row, by lengths: this divided by H, as a share.

A response's second attention, to its prompt, the merge of the two outputs, and the gathering of tokens from padded rows
move bytes in proportion to H, while a token's matrix products take FLOPs in proportion to H^2. The number is from
modelled updates (benchmarks/results/layout_times.md). Near the break-even both layouts take about the same time.
"""


def cheaper_layout(prompt_tokens: int, response_tokens: int, n: int, hidden_size: int) -> Literal["grouped", "packed"]:
    """Return the layout that takes less time for n sequences of P + R tokens, where kernels read lengths.

    Grouped rows have fewer tokens, each of which costs more (`MERGE_COST`). Padded rows are no candidate: packed rows
    have the same tokens without padding, and the same causal attention.

    Args:
        prompt_tokens: P, tokens of a prompt.
        response_tokens: R, tokens of a response.
        n: responses to a prompt.
        hidden_size: H.
    """
    cost = (1 - saved_share(prompt_tokens, response_tokens, n)) * (1 + MERGE_COST / hidden_size)
    return "grouped" if cost < 1 else "packed"


def saved_share(prompt_tokens: int, response_tokens: int, n: int) -> float:
    """Return the share of the tokens of n sequences that a prompt held once saves: P (n - 1) / n of P + R."""
    return prompt_tokens * (n - 1) / (n * (prompt_tokens + response_tokens))


PADDED = Layout("padded", _padded_rows, shares_prompt=False)
"""One sequence per row, padded on the right to the longest: causal attention never looks right, so there is no mask."""

PACKED = Layout("packed", _packed_rows, shares_prompt=False)
"""Concatenated sequences in a row, each attending to itself alone."""

PACKED_BRANCHED = replace(PACKED, attention="branched")
"""Packed for models with sliding windows: each layer has its own mask."""

PACKED_BY_LENGTHS = replace(PACKED_BRANCHED, rows=_filled_rows)
"""Packed for kernels that read lengths: a micro-batch is one row without padding, whose length costs no attention."""

GROUPED = Layout("grouped", _branched_group_rows, shares_prompt=True, attention="branched", dense_up_to=160)
"""A prompt once, then its responses, each attending to the prompt and itself, all starting at the same position.

Under a dense mask, tokens with which several responses begin are fed once, too. Below about 160 tokens such a mask
costs less than splitting rows (measured on a CPU at hidden sizes 64 to 320).
"""

BRANCHED = replace(GROUPED, dense_up_to=0)
"""Grouped for models in which a mask over the row is not enough, as with sliding windows."""

GROUPED_MASKED = Layout("grouped_masked", _masked_group_rows, shares_prompt=True)
"""Grouped with a dense mask, for models whose attention cannot be replaced."""


def input_lengths(batch: TrainBatch) -> torch.Tensor:
    """Return [S] int64: input tokens of each sequence, prompt and response."""
    return batch.prompt_offsets.diff()[batch.prompt_index] + (batch.lengths - 1).clamp_min(0)
