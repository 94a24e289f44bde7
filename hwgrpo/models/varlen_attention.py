"""Attention over packed tokens by torch's flash kernels, as a list of parts: no mask, no padding, no repeated key.

Sequences that see themselves alone are one part, whose output is the kernel's own.

A query's keys may lie in several places, as those of a response do: its prompt, which other responses share, and its
own tokens. Each place is a part, which the kernel computes with its log-sum-exp; outputs are averaged with the weights
that these give (Milakov and Gimelshein 2018, arXiv 1805.02867, merge partial softmaxes in this way). With the merged
output and log-sum-exp the kernel's backward of each part is exact: it needs of the softmax nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Part:
    """S sequences of consecutive queries and the consecutive keys that each attends to."""

    queries: slice
    """Among the T packed tokens."""
    keys: slice
    """Among the T packed tokens."""
    query_offsets: torch.Tensor
    """[S + 1] int32, within `queries`."""
    key_offsets: torch.Tensor
    """[S + 1] int32, within `keys`; every sequence with queries has keys."""
    most_queries: int
    """Longest sequence of queries."""
    most_keys: int
    """Longest sequence of keys."""
    causal: bool
    """A query sees the keys up to its own place, else all of its sequence."""
    window: int | None = None
    """A query of a causal part sees itself and the window - 1 keys before it; None: all keys before it."""


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: Sequence[Part], scaling: float | None
) -> torch.Tensor:
    """Return the attention of each query to the keys of all parts in which it is.

    Args:
        query: [T, heads, D].
        key: [T, key-value heads, D]; consecutive query heads share one.
        value: [T, key-value heads, D].
        parts: the first has all T tokens as queries and as keys.
        scaling: factor of the scores; None: D to the power of -1/2.

    Returns:
        [T, heads, D], in the dtype of the query.
    """
    return _Attention.apply(query, key, value, parts, scaling)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, parts: Any, scaling: Any) -> torch.Tensor:
        output = total = query  # replaced by those of the first part
        seeds: list[torch.Tensor] = []
        padded: list[bool] = []
        for number, part in enumerate(parts):
            of_part, sums, *rest, _ = torch.ops.aten._flash_attention_forward(
                query[part.queries],
                key[part.keys],
                value[part.keys],
                *_lengths(part),
                *(0.0, part.causal, False),
                scale=scaling,
                **_window(part),
            )
            seeds += rest
            padded.append(sums.dim() == 3)
            sums = _by_query(sums, part)
            if number == 0:
                output, total = of_part, sums
                continue
            before = total[part.queries]
            after = torch.logaddexp(before, sums)
            mine = output[part.queries]
            merged = mine * (before - after).exp()[..., None] + of_part * (sums - after).exp()[..., None]
            output[part.queries], total[part.queries] = merged.to(output.dtype), after
        ctx.parts, ctx.padded, ctx.scaling = parts, padded, scaling
        ctx.save_for_backward(query, key, value, output, total, *seeds)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, total, *seeds = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        sums: list[torch.Tensor] = []
        for number, part in enumerate(ctx.parts):
            of_part = torch.ops.aten._flash_attention_backward(
                gradient[part.queries],
                query[part.queries],
                key[part.keys],
                value[part.keys],
                output[part.queries],
                _by_head(total[part.queries], part, ctx.padded[number]),
                *_lengths(part),
                *(0.0, part.causal),
                *seeds[2 * number : 2 * number + 2],
                scale=ctx.scaling,
                **_window(part),
            )
            if number == 0:
                sums = list(of_part)
                continue
            for total_of, where, each in zip(sums, (part.queries, part.keys, part.keys), of_part, strict=True):
                total_of[where] += each
        return *sums, None, None


def _lengths(part: Part) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return part.query_offsets, part.key_offsets, part.most_queries, part.most_keys


def _window(part: Part) -> dict[str, int]:
    """Return the operators' window: keys before and after a query's own place."""
    return {} if part.window is None else {"window_size_left": part.window - 1, "window_size_right": 0}


def _by_query(sums: torch.Tensor, part: Part) -> torch.Tensor:
    """Return log-sum-exps as [queries, heads]; kernels give [heads, queries], or padded [S, heads, longest] (ROCm)."""
    if sums.dim() == 2:
        return sums.t()
    sequence, within = _places(part)
    return sums[sequence, :, within]


def _by_head(sums: torch.Tensor, part: Part, padded: bool) -> torch.Tensor:
    """Return [queries, heads] as the kernel gave them."""
    if not padded:
        return sums.t().contiguous()
    sequence, within = _places(part)
    result = sums.new_zeros(len(part.query_offsets) - 1, sums.shape[1], part.most_queries)
    result[sequence, :, within] = sums
    return result


def _places(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequence of each query, and its place in it."""
    count = part.queries.stop - part.queries.start
    query = torch.arange(count, device=part.query_offsets.device, dtype=torch.int32)
    sequence = torch.searchsorted(part.query_offsets[1:], query, right=True)
    return sequence, query - part.query_offsets[sequence]


def self_test(device: torch.device, dtype: torch.dtype, size: int, window: int | None = None) -> str | None:
    """Return how attention by parts differs on a device from one softmax in fp32, forward or backward; None if not.

    Args:
        device: where the kernels are.
        dtype: of 16 bits.
        size: D, channels of a head.
        window: sequences see themselves alone within it; None: prompts, and responses to them.
    """
    own = torch.tensor([0, 3, 20, 25, 26, 46], dtype=torch.int32, device=device)  # 2 prompts, responses of 5, 1, 20
    everything = slice(0, 46)
    rows = torch.tensor([0, 6, 26], dtype=torch.int32, device=device)
    parts = [Part(everything, everything, own, own, 20, 20, causal=True, window=window)]
    if window is None:
        parts.append(Part(slice(20, 46), slice(0, 20), rows, own[:3], 20, 17, causal=False))
    node = torch.repeat_interleave(torch.arange(5, device=device), own.diff().long(), output_size=46)
    prompt = torch.tensor([0, 1, 0, 0, 1], device=device)[node]
    place = torch.arange(46, device=device)
    visible = (node[:, None] == node) & (place[:, None] >= place)
    if window is None:
        visible |= (node == prompt[:, None]) & (node[:, None] > 1)
    else:
        visible &= place[:, None] - place < window
    draw = torch.Generator().manual_seed(0)
    heads = [torch.randn(46, count, size, generator=draw).to(device, dtype).requires_grad_() for count in (4, 2, 2)]
    along = torch.randn(46, 4, size, generator=draw).to(device, dtype)

    def by_one_softmax(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * size**-0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)

    wide = [each.detach().float().requires_grad_() for each in heads]
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        try:
            found = attend(heads[0], heads[1], heads[2], parts, None)
            results = found, *torch.autograd.grad(found, heads, along)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        right = by_one_softmax(*wide)
        expected = right, *torch.autograd.grad(right, wide, along.float())
    names = ("outputs", "gradients of queries", "gradients of keys", "gradients of values")
    for name, mine, theirs in zip(names, results, expected, strict=True):
        # each entry has a few roundings of half a unit in the last place
        difference = float((mine.detach().float() - theirs.detach()).norm() / theirs.detach().norm())
        if not difference <= 4 * torch.finfo(dtype).eps:
            return f"{name} differ by {difference:.1e} from those of one softmax"
    return None
