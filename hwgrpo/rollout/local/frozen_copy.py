"""A frozen copy of the policy, for an engine that samples with weights or a dtype of its own."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from itertools import chain

import torch
from transformers import PreTrainedModel


def copy_frozen(
    model: PreTrainedModel,
    dtype: torch.dtype,
    weights: Iterator[tuple[torch.nn.Parameter, torch.Tensor]] | None = None,
    *,
    share: bool = False,
    own: Collection[torch.Tensor] = (),
) -> PreTrainedModel:
    """Return a copy of a model with frozen parameters in `dtype`; ties are kept, and quantized weights shared.

    The copy of a model with adapters keeps their active, merged and scaling state of now. Buffers keep their dtype:
    rotary frequencies in half precision would be wrong from a few hundred positions on.

    Args:
        model: the model to copy.
        dtype: dtype of the copy's parameters.
        weights: yields every parameter of the model with its value for the copy, where the model is on the meta device;
            None: the parameters themselves.
        share: share parameters that are in `dtype` already.
        own: parameters that are not shared for all that.
    """
    unshared = {id(parameter) for parameter in own}
    pairs = ((parameter, parameter) for parameter in model.parameters()) if weights is None else weights
    memo = {
        id(parameter): parameter
        if not parameter.is_floating_point() or (share and parameter.dtype == dtype and id(parameter) not in unshared)
        else torch.nn.Parameter(weight.detach().to(dtype, copy=True), requires_grad=False)
        for parameter, weight in pairs
    }
    return copy.deepcopy(model, memo)


@torch.no_grad()
def refresh(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy what training changes: trainable parameters, and buffers."""
    pairs = zip(source.parameters(), target.parameters(), strict=True)
    trained = ((current, stale) for current, stale in pairs if current.requires_grad)
    for current, stale in chain(trained, zip(source.buffers(), target.buffers(), strict=True)):
        if current is not stale:
            stale.copy_(current)
