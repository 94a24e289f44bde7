"""torch's two flash operators on a CPU, where torch has none: the same schema and layouts, by plain products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch


def _sequences(q_offsets: torch.Tensor, k_offsets: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    bounds = zip(pairwise(q_offsets.tolist()), pairwise(k_offsets.tolist()), strict=True)
    return ((slice(*of_queries), slice(*of_keys)) for of_queries, of_keys in bounds)


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    causal: bool,
    scale: float | None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> torch.Tensor:
    """Return [heads, Q, K]; causal ones end at the same place, and windows lie around that of the query."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    shift = scores.shape[2] - scores.shape[1]
    before, after = window_size_left, 0 if causal else window_size_right
    seen = torch.ones(scores.shape[1:], dtype=torch.bool)
    seen = seen if after is None else seen.tril(shift + after)
    seen = seen if before is None else seen.triu(shift - before)
    return scores.masked_fill(~seen, -torch.inf)


@contextmanager
def flash_ops(*, padded: bool = False) -> Iterator[list[str]]:
    """Register the operators for a CPU within the block; yield the names of those that were called.

    Args:
        padded: log-sum-exps are [sequences, heads, longest], as they were on ROCm, and not [heads, tokens].
    """
    called: list[str] = []
    drawn: dict[int, tuple[int, int]] = {}

    def forward(q, k, v, q_offsets, k_offsets, max_q, max_k, dropout, causal, debug, *, scale=None, **window):
        called.append("forward")
        assert (dropout, debug) == (0.0, False)
        assert q_offsets.dtype == k_offsets.dtype == torch.int32
        assert (int(q_offsets[-1]), int(k_offsets[-1])) == (len(q), len(k))
        assert len(q), "a kernel cannot be launched without queries"
        assert max_q > 1 or len(q) == len(q_offsets) - 1, "torch takes sequences of one query for a batch of tokens"
        assert int(q_offsets.diff().max()) <= max_q
        assert int(k_offsets.diff().max()) <= max_k
        output, sums = (
            torch.empty_like(q),
            q.new_zeros(q.shape[1], len(q), dtype=torch.promote_types(q.dtype, torch.float32)),
        )
        boxes = q.new_full((len(q_offsets) - 1, q.shape[1], max_q), torch.nan, dtype=sums.dtype)
        for number, (rows, columns) in enumerate(_sequences(q_offsets, k_offsets)):
            scores = _scores(q[rows].to(sums.dtype), k[columns].to(sums.dtype), causal, scale, **window)
            sums[:, rows] = scores.logsumexp(-1)
            values = v[columns].to(sums.dtype).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
            output[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
            boxes[number, :, : rows.stop - rows.start] = sums[:, rows]
        seed = torch.tensor([len(called), 0])
        drawn[len(called)] = len(q), len(k)
        return output, boxes if padded else sums, seed, seed.clone(), q.new_empty(0)

    def backward(
        grad,
        q,
        k,
        v,
        output,
        sums,
        q_offsets,
        k_offsets,
        max_q,
        max_k,
        dropout,
        causal,
        seed,
        unused,
        *,
        scale=None,
        **window,
    ):
        called.append("backward")
        assert drawn[int(seed[0])] == (len(q), len(k)), "the random state of another part"
        assert seed.tolist() == unused.tolist()
        expected = (len(q_offsets) - 1, q.shape[1], max_q) if padded else (q.shape[1], len(q))
        assert sums.shape == expected
        assert sums.is_contiguous()
        wide = sums.dtype
        results = [torch.zeros(each.shape, dtype=wide) for each in (q, k, v)]
        group = q.shape[1] // k.shape[1]
        for number, (rows, columns) in enumerate(_sequences(q_offsets, k_offsets)):
            count = rows.stop - rows.start
            of_rows = sums[number, :, :count] if padded else sums[:, rows]
            keys, values = (each[columns].to(wide).repeat_interleave(group, dim=1) for each in (k, v))
            scores = _scores(q[rows].to(wide), keys, causal, scale, **window)
            weights = (scores - of_rows[..., None]).exp()
            of_output = grad[rows].to(wide)
            inner = (of_output * output[rows].to(wide)).sum(-1).t()[..., None]
            of_scores = weights * (torch.einsum("qhd,khd->hqk", of_output, values) - inner)
            of_scores = of_scores * (q.shape[-1] ** -0.5 if scale is None else scale)
            results[0][rows] += torch.einsum("hqk,khd->qhd", of_scores, keys)
            for result, each in zip(
                results[1:],
                (
                    torch.einsum("hqk,qhd->khd", of_scores, q[rows].to(wide)),
                    torch.einsum("hqk,qhd->khd", weights, of_output),
                ),
                strict=True,
            ):
                result[columns] += each.unflatten(1, (-1, group)).sum(2)
        return tuple(result.to(each.dtype) for result, each in zip(results, (q, k, v), strict=True))

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield called
    finally:
        library._destroy()
