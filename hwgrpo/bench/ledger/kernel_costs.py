"""What a kernel costs by the model: rates of a chip, and how many kernels torch launches for an operation.

The modelled time of a kernel is the largest of its bytes over the bandwidth, its FLOPs over the matrix rate, and the
least time of a kernel. No kernel reaches a chip's peak: the rates are the shares of its peaks that were measured on an
H100 SXM (benchmarks/results/h100.md: a copy 2.94 of 3.35 TB/s, a GEMM of 8192^3 756 of 989.4 TFLOP/s).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hwgrpo_backends.peaks import Chip
from torch import Tensor

SHARE_OF_BANDWIDTH = 2.94 / 3.35
SHARE_OF_FLOPS = 756 / 989.4
LEAST_SECONDS = 3e-6
"""Least time of a kernel, with the gap to the next one."""

NO_KERNEL = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_local_scalar_dense")
)
"""Operations without a kernel, beside those that return views."""
KERNELS: Mapping[str, int] = {
    **dict.fromkeys(("constant_pad_nd", "slice_backward", "select_backward"), 2),  # a fill, and a copy
    **dict.fromkeys(("index_add", "index_copy", "index_fill", "masked_fill", "scatter", "scatter_add"), 2),  # a copy
    "_foreach_norm": 2,  # of chunks, and of tensors; per launch over lists
    "_fused_rms_norm_backward": 2,  # of the input, and of the weight
    "_flash_attention_backward": 3,  # sums of rows, the gradients, and a cast of the queries'
    "_scaled_dot_product_flash_attention_backward": 3,
    "_efficient_attention_backward": 2,  # a fill, and the gradients
    "_scaled_dot_product_efficient_attention_backward": 2,
    "embedding_dense_backward": 12,  # a radix sort of the tokens, their segments, and the sums
    "index_put": 11,  # with accumulate: a copy, then as in place
    "index_put_": 10,  # with accumulate: linear indices, a radix sort, and the sums
    "sort": 4,
    "topk": 3,
}
"""Operation -> kernels that torch launches on a GPU where they are several, read in its sources. A sort takes several
passes, whose number depends on sizes: these are typical ones."""
READS_AS_MUCH_AS_IT_WRITES = frozenset(("embedding", "index", "index_select", "gather"))
"""Operations that read only some elements of their first tensor."""
WRITES_AS_MUCH_AS_IT_READS = frozenset(("index_copy_", "index_put_", "scatter_", "index_add_"))
"""Operations that write only some elements of their first tensor: as many as their last one has."""
WRITES_ONLY = frozenset(("copy_", "fill_", "zero_"))
"""Operations in place that do not read their first tensor."""

UNWRITTEN = {"_fused_adamw_": ("grads",)}
"""Operation -> arguments that it writes by its schema, but not as it is called here."""

CHUNK, BLOCKS = 65536, 320
"""Elements per block, and blocks per launch, of torch's kernels over lists of tensors (MultiTensorApply.cuh)."""
TENSORS = (110, 64, 48, 36, 30)
"""Tensors per launch, by the number of lists."""


@dataclass(frozen=True)
class Rates:
    """Rates by the model."""

    chip: str
    arch: str
    """As from `Backend.arch`."""
    bandwidth: float
    """B/s."""
    flops: Mapping[str, float]
    """Dtype -> FLOP/s of matrix products."""
    least_seconds: float = LEAST_SECONDS

    @classmethod
    def of(cls, chip: Chip) -> Rates:
        """Return the modelled rates of a chip whose bandwidth is known."""
        assert chip.bandwidth is not None, f"the bandwidth of {chip.title} is not known"
        rates = {dtype: SHARE_OF_FLOPS * peak for dtype, peak in chip.flops.items()}
        return cls(chip.title, chip.arch, SHARE_OF_BANDWIDTH * chip.bandwidth, rates)

    def seconds(self, kernels: int, count: int, flops: int, dtype: torch.dtype) -> float:
        """Return the modelled time of kernels that share an operation's `count` bytes and its FLOPs evenly."""
        rate = self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])
        return max(count / self.bandwidth, flops / rate, kernels * self.least_seconds)


def launches_over_lists(lists: Sequence[Sequence[Tensor]]) -> int:
    """Return the kernels that torch launches for an operation over lists of tensors of equal sizes."""
    most = TENSORS[min(len(lists), len(TENSORS)) - 1]
    launches = tensors = blocks = 0
    for tensor in lists[0]:
        left = -(-tensor.numel() // CHUNK)
        tensors += left > 0
        while left:
            new = min(left, BLOCKS - blocks)
            left, blocks = left - new, blocks + new
            if blocks == BLOCKS or (not left and tensors == most):
                launches, blocks, tensors = launches + 1, 0, int(left > 0)
    return launches + (blocks > 0)


def kernels_of(name: str, args: Sequence[Any]) -> int:
    """Return the kernels of an operation on a GPU.

    Args:
        name: as in torch.ops.aten.
        args: its positional arguments.
    """
    if name in NO_KERNEL:
        return 0
    if name.startswith(("_foreach_", "_fused_")) and isinstance(args[0], list | tuple):
        lists = [each for each in args if isinstance(each, list | tuple) and len(each) and isinstance(each[0], Tensor)]
        depth = len(lists) + (not name.endswith("_"))  # the results are a list, too
        return KERNELS.get(name, 1) * launches_over_lists([lists[0]] * depth)
    if name in ("index_put", "index_put_") and not (len(args) > 3 and args[3]):
        return 2 - name.endswith("_")
    return KERNELS.get(name, 1)
