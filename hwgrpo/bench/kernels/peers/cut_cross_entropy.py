"""Apple's cut-cross-entropy. Signature: cut-cross-entropy 25.1.1, linear_cross_entropy.py.

Run in Triton's CPU interpreter (tests/peers), never on a device.
"""

from functools import cache

import torch
from hwgrpo_kernels import Shape
from torch import Tensor

from hwgrpo.bench.kernels.peers.peer import Peer, Score, needs_triton_device


@cache
def _load() -> Score:
    from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]

    def score(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        return -linear_cross_entropy(hidden, weight, targets, reduction="none"), None

    return score


def _cannot(device_type: str, dtype: torch.dtype, shape: Shape) -> str:
    if dtype.itemsize != 2:
        return "it accepts 16-bit operands only"
    return needs_triton_device(device_type)


CCE = Peer("cut-cross-entropy", "cut-cross-entropy", ("cut_cross_entropy", "triton"), _cannot, score=_load)
