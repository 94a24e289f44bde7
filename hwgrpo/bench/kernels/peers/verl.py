"""verl's fused head. Signature: verl 0.9.1, verl/utils/kernel/linear_cross_entropy.py.

Run in Triton's CPU interpreter (tests/peers), never on a device.
"""

from functools import cache

import torch
from hwgrpo_kernels import Shape
from torch import Tensor

from hwgrpo.bench.kernels.peers.peer import Peer, Score, needs_triton_device


@cache
def _load() -> Score:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

    def score(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprob, entropy = linear_cross_entropy(hidden, weight, targets, 1.0, "none", None)
        return logprob, entropy

    return score


def _cannot(device_type: str, dtype: torch.dtype, shape: Shape) -> str:
    if shape.H % 128:
        return f"it needs H to be a multiple of 128, not {shape.H}"
    return needs_triton_device(device_type)


LINEAR = Peer("verl", "verl", ("verl", "triton"), _cannot, score=_load)
