"""The sampling ops in Triton: launch arguments of sampling_kernels.py. No call waits for the device."""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
from torch import Tensor

from . import sampling_kernels
from .kernel_launches import Arguments, KernelWork, declare_work, tensor_bytes
from .matrices import with_dense_rows
from .rows_triton import warp_size
from .sampling_definitions import BLOCK

PER = 8
"""Blocks per program of `block_sums`: with 4 warps two accesses of 16 bytes of a thread in 16-bit."""
LANES, WIDTH = 256, 4
"""A tile of the search: a lane per thread, tokens per lane."""
WAYS = 8
"""Thresholds that a pass of the search compares with: it takes 3 bits of the threshold."""
PASSES = 4
"""Reads of a row that a filter is counted with: `kept_sums_kernel` reads what its search has left, as often as needed.
"""

_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Bits of fp32 that a dtype lacks."""
_kernels: Any = sampling_kernels


def block_sums(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """See `sampling_definitions.block_sums`."""
    logits = with_dense_rows(logits)
    rows, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    block_max, block_sum = (logits.new_empty(rows, blocks, dtype=torch.float32) for _ in range(2))
    if rows:
        with torch.accelerator.device_index(logits.device.index):
            _kernels.block_sums_kernel[(rows, triton.cdiv(blocks, PER))](
                logits, block_max, block_sum, temperature, vocab, logits.stride(0), blocks, BLOCK=BLOCK, PER=PER,
                DIVIDE=temperature != 1.0, num_warps=4,
            )  # fmt: skip
    return block_max, block_sum


def kept_sums(
    logits: Tensor, block_max: Tensor, block_sum: Tensor, top_k: int, top_p: float, min_p: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `sampling_definitions.kept_sums`."""
    logits = with_dense_rows(logits)
    (rows, vocab), blocks = logits.shape, block_max.shape[1]
    kept_sum = torch.empty_like(block_sum)
    threshold, floor = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    if rows:
        with torch.accelerator.device_index(logits.device.index):
            _kernels.kept_sums_kernel[(rows,)](
                logits, block_max, block_sum, kept_sum, threshold, floor, temperature, top_k, top_p,
                (1.0 - top_p) / vocab, min_p, vocab, logits.stride(0), blocks, BLOCK=BLOCK,
                BLOCKS=_padded(blocks), LANES=LANES, WIDTH=WIDTH, WAYS=WAYS, SHIFT=_SHIFTS[logits.dtype],
                DIVIDE=temperature != 1.0, TOP_K=0 < top_k < vocab, TOP_P=top_p < 1.0, MIN_P=min_p > 0.0,
                num_warps=LANES // warp_size(),
            )  # fmt: skip
    return kept_sum, threshold, floor


def pick(
    logits: Tensor, block_max: Tensor, block_sum: Tensor, uniform: Tensor | None, threshold: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `sampling_definitions.pick`."""
    logits = with_dense_rows(logits)
    (rows, vocab), blocks = logits.shape, block_max.shape[1]
    token = logits.new_empty(rows, dtype=torch.int64)
    logprob = logits.new_empty(rows, dtype=torch.float32)
    if rows:
        with torch.accelerator.device_index(logits.device.index):
            _kernels.pick_kernel[(rows,)](
                logits, block_max, block_sum, uniform, threshold, token, logprob, temperature, vocab, logits.stride(0),
                blocks, 0 if uniform is None else uniform.stride(0), BLOCK=BLOCK, BLOCKS=_padded(blocks),
                DIVIDE=temperature != 1.0, num_warps=4,
            )  # fmt: skip
    return token, logprob


def _padded(blocks: int) -> int:
    return int(triton.next_power_of_2(blocks))  # pyright: ignore[reportArgumentType]  (a constexpr in a kernel alone)


def _work_of_pick(launch: Arguments) -> KernelWork:
    """Of the logits it reads a block per row."""
    logits = launch["logits"]
    others = [each for name, each in launch.items() if isinstance(each, Tensor) and name != "logits"]
    read = min(BLOCK, logits.shape[1]) * logits.shape[0] * logits.element_size()
    return KernelWork(read + sum(map(tensor_bytes, others)))


def _work_of_kept_sums(launch: Arguments) -> KernelWork:
    """It depends on the logits; here `PASSES` reads of all."""
    tensors = [each for each in launch.values() if isinstance(each, Tensor)]
    return KernelWork((PASSES - 1) * tensor_bytes(launch["logits"]) + sum(map(tensor_bytes, tensors)))


declare_work("pick_kernel", _work_of_pick)
declare_work("kept_sums_kernel", _work_of_kept_sums)
