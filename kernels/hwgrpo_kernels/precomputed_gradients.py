"""Gradients that the forward has computed, returned by the backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class PrecomputedGradients(torch.autograd.Function):
    """Attaches precomputed gradients to a loss; backward multiplies them by grad_output and releases them."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: tuple[Tensor | None, ...], are_final: bool, *parameters: Tensor | None
    ) -> Tensor:
        ctx.gradients, ctx.are_final = gradients, are_final
        ctx.dtypes = [None if each is None else each.dtype for each in parameters]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_token_loss computes its gradients in the forward, and the first backward released them: "
                "backward(retain_graph=True) cannot repeat it; call linear_token_loss again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        (grad_output,) = grad_outputs
        is_known = grad_output.device.type == "cpu"  # reading it elsewhere synchronizes
        is_one = is_known and float(grad_output) == 1.0
        computed = [each for each in gradients if each is not None]
        if ctx.are_final and is_known and not is_one:
            raise RuntimeError(
                f"linear_token_loss was called with final_gradients=True, but its loss is multiplied by "
                f"{float(grad_output):g}: multiply in loss_fn, or call it with final_gradients=False"
            )
        if ctx.are_final and not is_known:
            invalidate_unless_one(computed, grad_output)
        elif not is_one:
            for each in computed:
                each.mul_(grad_output)
        cast = (each if each is None else each.to(dtype) for each, dtype in zip(gradients, ctx.dtypes))
        return None, None, None, *cast


def invalidate_unless_one(gradients: Sequence[Tensor], grad_output: Tensor) -> None:
    """Make the first row of each gradient NaN if grad_output [] is not 1, without waiting for the device."""
    factor = torch.where(grad_output == 1.0, 1.0, torch.nan)
    for each in gradients:
        each[:1].mul_(factor)
