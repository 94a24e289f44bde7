"""How the sequences of a micro-batch are laid out for the model: `padded` rows, or one `packed` row.

A layout decides where tokens stand and what they may attend to; the loss never sees it. Rows of hidden states that
predict response tokens are compacted, so prompt tokens and padding never meet the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hwgrpo.values import TrainBatch


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass reads. B rows of L tokens, N response tokens of S sequences."""

    input_ids: torch.Tensor
    """[B, L] int64."""
    position_ids: torch.Tensor
    """[B, L] int64: position within the sequence."""
    attention_mask: torch.Tensor | None
    """[B, 1, L, L] bool (True: may attend), or None where plain causal attention is right."""
    hidden_rows: torch.Tensor
    """[N] int64: index into the flattened [B * L] hidden states of the one that predicts each response token."""
    targets: torch.Tensor
    """[N] int64: the response tokens."""
    cu_seqlens: torch.Tensor
    """[S + 1] int64: bounds of the sequences among the N rows."""
    token_index: torch.Tensor
    """[N] int64: where each response token stands in the TrainBatch's [R] arrays."""
    signals: Mapping[str, torch.Tensor]
    """name -> [N] fp32: what the loss reads per token (advantage, weight, old_logprob, ...)."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same micro-batch on `device`."""
        if self.input_ids.device == device:
            return self
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            attention_mask=None if self.attention_mask is None else self.attention_mask.to(device),
            hidden_rows=self.hidden_rows.to(device),
            targets=self.targets.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            signals={name: tensor.to(device) for name, tensor in self.signals.items()},
        )


@dataclass(frozen=True)
class TokenSignals:
    """Signals of a whole TrainBatch, ready to be cut: per sequence and per response token."""

    per_sequence: Mapping[str, torch.Tensor]
    """name -> [S] fp32, repeated over a sequence's tokens."""
    per_token: Mapping[str, torch.Tensor]
    """name -> [R] fp32."""


def padded(batch: TrainBatch, sequences: Sequence[int], signals: TokenSignals) -> MicroBatch:
    """Lay sequences out as rows, padded on the right to the longest.

    Causal attention never looks right, so no mask is needed and padding changes nothing.

    Args:
        batch: the update's sequences.
        sequences: which of them, in order; an empty list gives one row of one token and N = 0.
        signals: what the loss reads per token.
    """
    rows = [_tokens(batch, s) for s in sequences]
    length = max((len(prompt) + len(response) for prompt, response in rows), default=1)
    input_ids = torch.zeros(max(len(rows), 1), length, dtype=torch.int64)
    starts = []
    for i, (prompt, response) in enumerate(rows):
        input_ids[i, : len(prompt)] = prompt
        input_ids[i, len(prompt) : len(prompt) + len(response)] = response
        starts.append(i * length + len(prompt))
    positions = torch.arange(length).expand(len(input_ids), length)
    return _micro_batch(batch, sequences, signals, input_ids, positions, None, starts)


def packed(batch: TrainBatch, sequences: Sequence[int], signals: TokenSignals) -> MicroBatch:
    """Lay sequences out one behind the other in a single row, each attending to itself alone (a block-diagonal mask).

    Args and result as for `padded`.
    """
    rows = [_tokens(batch, s) for s in sequences]
    tokens = [part for pair in rows for part in pair] or [torch.zeros(1, dtype=torch.int64)]
    lengths = torch.tensor([len(prompt) + len(response) for prompt, response in rows] or [1])
    input_ids = torch.cat(tokens)[None]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    ends = lengths.cumsum(0)
    positions = torch.arange(len(owner)) - (ends - lengths)[owner]
    same = owner[:, None] == owner[None, :]
    mask = same & (positions[:, None] >= positions[None, :])
    starts = [
        int(end) - int(length) + len(prompt) for end, length, (prompt, _) in zip(ends, lengths, rows, strict=False)
    ]
    return _micro_batch(batch, sequences, signals, input_ids, positions[None], mask[None, None], starts)


def cut(batch: TrainBatch, sequences: Sequence[int], budget: int, layout: str) -> list[list[int]]:
    """Cut sequences into micro-batches of at most `budget` tokens, sorted by length.

    Args:
        batch: the update's sequences.
        sequences: which of them; those without response tokens are left out (nothing is learned from them).
        budget: tokens per micro-batch, prompt and response, padding included where the layout pads.
        layout: `padded` counts rows x longest, `packed` counts tokens.

    Returns:
        Lists of sequence indices. A sequence longer than the budget stands alone.
    """
    prompt_lengths = batch.prompt_offsets.diff()[batch.prompt_index]
    lengths = (prompt_lengths + batch.lengths).tolist()
    filled = batch.lengths.gt(0).tolist()
    order = sorted((s for s in sequences if filled[s]), key=lambda s: (-lengths[s], s))
    parts: list[list[int]] = []
    cost = 0
    for s in order:
        grown = (len(parts[-1]) + 1) * lengths[parts[-1][0]] if parts and layout == "padded" else cost + lengths[s]
        if not parts or grown > budget:
            parts.append([s])
            cost = lengths[s]
        else:
            parts[-1].append(s)
            cost = grown
    return parts


def _tokens(batch: TrainBatch, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    prompt = int(batch.prompt_index[sequence])
    return (
        batch.prompt_tokens[batch.prompt_offsets[prompt] : batch.prompt_offsets[prompt + 1]],
        batch.tokens[batch.offsets[sequence] : batch.offsets[sequence + 1]],
    )


def _micro_batch(
    batch: TrainBatch,
    sequences: Sequence[int],
    signals: TokenSignals,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    mask: torch.Tensor | None,
    starts: Sequence[int],
) -> MicroBatch:
    """Collect per-token rows; `starts` holds the flat position of each sequence's first response token."""
    chosen = torch.tensor(list(sequences), dtype=torch.int64)
    lengths = batch.lengths[chosen]
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(len(chosen)), lengths)
    within = torch.arange(int(cu_seqlens[-1])) - cu_seqlens[owner]
    token_index = batch.offsets[chosen][owner] + within
    first = torch.tensor(list(starts), dtype=torch.int64)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=mask,
        hidden_rows=first[owner] + within - 1,
        targets=batch.tokens[token_index],
        cu_seqlens=cu_seqlens,
        token_index=token_index,
        signals={name: tensor[chosen][owner] for name, tensor in signals.per_sequence.items()}
        | {name: tensor[token_index] for name, tensor in signals.per_token.items()},
    )
