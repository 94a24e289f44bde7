"""`token_logprob` whose backward overwrites the logits with their gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import library
from .guards import refuse_compiled_region
from .logit_map import LogitMap

_REMEDY = "leave inplace_backward out"


def token_logprob(
    logits: Tensor, targets: Tensor, mapping: LogitMap, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return logprob [N] and entropy [N] or None; backward allocates no [N,V] memory.

    Args:
        logits: [N,V], checked, in grad mode.
        targets: [N] int64.
        mapping: from raw logits to the distribution's.
        with_entropy: also return entropies.

    Raises:
        ValueError: the gradient cannot overwrite these logits.
        RuntimeError: called inside a compiled region.
    """
    refuse_compiled_region("token_logprob with inplace_backward")
    _check(logits)
    logprob, entropy = _TokenLogprobInPlace.apply(logits, targets, *mapping, with_entropy)
    return logprob, entropy if with_entropy else None


def _check(logits: Tensor) -> None:
    """Raise ValueError unless the gradient may overwrite `logits`."""
    if not logits.requires_grad:
        raise ValueError(f"logits do not require grad, so inplace_backward has nothing to write; {_REMEDY}")
    base = logits._base if logits._is_view() else logits
    if base is None or base.is_leaf:
        kind = "a leaf" if base is logits else "a view of a leaf"
        raise ValueError(f"logits are {kind}, whose values inplace_backward would overwrite; {_REMEDY}, or pass a copy")
    rows, vocab = logits.shape
    if (vocab > 1 and logits.stride(1) != 1) or (rows > 1 and logits.stride(0) < vocab):
        raise ValueError(
            f"logits have strides {list(logits.stride())}, but inplace_backward needs dense rows "
            f"that do not overlap; {_REMEDY}, or pass logits.contiguous()"
        )


class _TokenLogprobInPlace(torch.autograd.Function):
    """Statistics of logits, saved like any input: torch detects another backward that needs their values."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        scale: float,
        squash: float,
        row_scale: Tensor | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        stats = library.token_logprob(logits, targets, scale, squash, row_scale, with_entropy)
        ctx.save_for_backward(logits, targets, row_scale, *stats)
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.squash, ctx.spent = scale, squash, False
        return stats[:2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.spent:
            raise RuntimeError(
                "token_logprob(inplace_backward=True) overwrote the logits with their gradient in the first backward, "
                f"so a second is impossible; {_REMEDY}"
            )
        logits, targets, row_scale, logprob, entropy, row_max, log_sum = ctx.saved_tensors
        ctx.spent = True
        grad_logprob, grad_entropy = grad_outputs
        grad = logits.detach()  # the same memory and version counter
        library.row_grad(
            logits=grad, targets=targets, logprob=logprob, entropy=None if grad_entropy is None else entropy,
            row_max=row_max, log_sum=log_sum,
            grad_logprob=torch.zeros_like(logprob) if grad_logprob is None else grad_logprob,
            grad_entropy=grad_entropy, scale=ctx.scale, squash=ctx.squash, row_scale=row_scale, out=grad,
        )  # fmt: skip
        return grad, None, None, None, None, None
