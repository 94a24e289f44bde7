"""Chunk sizes: rows of logits at a time, a pure function of vocabulary, dtype and device, never of free memory."""

from collections.abc import Sequence

import torch

_CPU_BYTES = 8 * 2**20  # fp32 logits of a chunk stay near the last-level cache
_CPU_LEAST_ROWS = 64  # below this, streaming the head's weight costs more than the cache saves
_ACCELERATOR_BYTES = 5 * 2**28  # 1.25 GiB: 4096 rows of bf16 at V = 152k, enough that dW's read-modify-write is small


def chunk_rows_for(vocab: int, logits_dtype: torch.dtype, device_type: str, buffers: int = 1) -> int:
    """Return the default number of rows per chunk.

    Args:
        vocab: V.
        logits_dtype: dtype of the chunk's logits buffer. The CPU computes in fp32 for any buffer dtype.
        device_type: torch device type.
        buffers: logits buffers per chunk: one more with a reference, and one more if the gradient does not overwrite
            the logits (`head.logits_buffers`).
    """
    if device_type == "cpu":
        rows = _CPU_BYTES // (4 * vocab * buffers)
        return max(_CPU_LEAST_ROWS, rows // 16 * 16)
    rows = _ACCELERATOR_BYTES // (logits_dtype.itemsize * vocab * buffers)
    return rows // 512 * 512 if rows >= 512 else max(1, rows)


def even_chunks(rows: int, chunk_rows: int) -> list[tuple[int, int]]:
    """Split [0, rows) into half-open ranges of `chunk_rows`; the last may be shorter."""
    return [(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows)]


def longest(chunks: Sequence[tuple[int, int]]) -> int:
    """Return the rows of the longest chunk; 0 for none."""
    return max((stop - start for start, stop in chunks), default=0)


def sequence_chunks(bounds: list[int], chunk_rows: int) -> list[tuple[int, int]] | None:
    """Group full sequences into chunks of at most `chunk_rows` rows.

    Args:
        bounds: [S+1] row offsets of the sequences.

    Returns:
        Half-open ranges of *sequence indices*, or None when one sequence alone is longer than a chunk.
    """
    chunks, first = [], 0
    for index in range(len(bounds) - 1):
        if bounds[index + 1] - bounds[index] > chunk_rows:
            return None
        if bounds[index + 1] - bounds[first] > chunk_rows:
            chunks.append((first, index))
            first = index
    return [*chunks, (first, len(bounds) - 1)]
