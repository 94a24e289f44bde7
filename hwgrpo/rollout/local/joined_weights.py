"""Weights side by side in memory: layers of the same input are then one product, and parameters stay what they are.

Each weight becomes a view of its part of one tensor. Whoever updates it in place, as `frozen_copy.refresh`, updates the
joined tensor, which takes no further memory. What is trained stays as it is: transformers' `save_pretrained` clones
each of several parameters in one memory, and strategies may keep trained ones in buffers of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


@torch.no_grad()
def join(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the concatenation along the first dimension that the weights are views of, or None.

    Weights that are not side by side are moved. That needs frozen parameters whose memory is theirs alone.
    """
    if not weights or not all(_is_plain(weight) for weight in weights) or not _are_alike(weights):
        return None
    if not _are_side_by_side(weights):
        if not all(_may_move(weight) for weight in weights):
            return None
        joined = torch.cat(list(weights))
        for weight, part in zip(weights, joined.split([len(weight) for weight in weights]), strict=True):
            weight.data = part
    first = weights[0]
    shape = (sum(len(weight) for weight in weights), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def _is_plain(weight: torch.Tensor) -> bool:
    return type(weight) is nn.Parameter and type(weight.data) is torch.Tensor and weight.is_contiguous()


def _are_alike(weights: Sequence[torch.Tensor]) -> bool:
    return len({(weight.shape[1:], weight.dtype, weight.device) for weight in weights}) == 1


def _are_side_by_side(weights: Sequence[torch.Tensor]) -> bool:
    if len({weight.untyped_storage().data_ptr() for weight in weights}) > 1:
        return False
    return all(one.storage_offset() + one.numel() == other.storage_offset() for one, other in pairwise(weights))


def _may_move(weight: torch.Tensor) -> bool:
    """Return whether a weight is frozen, and no other tensor can view its memory, but such as view it whole."""
    storage = weight.untyped_storage()
    shared = weight.device.type == "cpu" and weight.is_shared()
    return not weight.requires_grad and not shared and storage.nbytes() == weight.numel() * weight.element_size()
