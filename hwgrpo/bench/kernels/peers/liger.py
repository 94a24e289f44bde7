"""Liger-Kernel's heads. Signatures: liger-kernel 0.8.5, liger_kernel/ops and liger_kernel/chunked_loss.

Run on a CPU, the Triton one in Triton's interpreter (tests/peers); never on a device, where the scaled one may be CuTe
and the GRPO loss is compiled.
"""

from functools import cache

import torch
from hwgrpo_kernels import Shape
from torch import Tensor

from hwgrpo.bench.kernels.peers.peer import Loss, Peer, Score, anywhere, needs_triton_device

MODULES = ("liger_kernel", "triton")


@cache
def _load_scaled() -> Score:
    """CuTe on sm_90 where its extras are installed, else torch in chunks of 512 rows."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearScaledCrossEntropyFunction,
    )

    def score(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets, 1.0, -100, 1, True)
        return -nll, entropy

    return score


@cache
def _load_triton() -> Score:
    """Row chunks through Triton's cross-entropy, gradients deferred to backward since they are weighted per token."""
    from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyFunction,
    )

    def score(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        nll = LigerFusedLinearCrossEntropyFunction.apply(
            hidden, weight, targets, None, None, -100, 0.0, 0.0, "none", None
        )[0]
        return -nll, None

    return score


@cache
def _load_grpo() -> Loss:
    """The fused GRPO loss, in torch; compiled, as it is by default, on accelerators."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyright: ignore[reportMissingImports]

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
        sequences = advantages.shape[0]
        grpo = LigerFusedLinearGRPOLoss(
            beta=0.0, compiled=hidden.device.type != "cpu", use_ref_model=False, loss_type="dapo", temperature=1.0
        )
        ids = targets.view(sequences, -1)
        rows = hidden.view(sequences, ids.shape[1], -1)
        return grpo(rows, weight, ids, torch.ones_like(ids, dtype=torch.float32), advantages)[0]

    return loss


def _triton_only(device_type: str, dtype: torch.dtype, shape: Shape) -> str:
    return needs_triton_device(device_type)


SCALED = Peer("Liger scaled CE", "liger-kernel", MODULES, anywhere, score=_load_scaled)
TRITON = Peer("Liger Triton CE", "liger-kernel", MODULES, _triton_only, score=_load_triton)
GRPO = Peer("Liger GRPO", "liger-kernel", MODULES, anywhere, loss=_load_grpo)
