"""A reference distribution for the full KL divergence in `linear_token_loss`."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import argument_checks
from .head import Head
from .streaming import ReferenceRows


class ReferenceHead(NamedTuple):
    """Hidden states and LM head of a reference model with the same vocabulary; they get no gradient.

    Args:
        hidden_NH: [N,H'] of the same rows as the policy's; H' may differ from the policy's H.
        weight_VH: [V,H']; under a vocab_group this rank's shard, the same rows as the policy's.
        bias_V: [V] or None.
    """

    hidden_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None = None


def check_reference(reference: object, hidden_NH: Tensor, weight_VH: Tensor) -> ReferenceHead | None:
    """Return `reference` if it fits the policy's rows and vocabulary.

    Raises:
        ValueError: it is no `ReferenceHead`, or its shapes, dtypes or device do not match.
    """
    if reference is None:
        return None
    if not isinstance(reference, ReferenceHead):
        raise ValueError(f"reference must be a ReferenceHead(hidden_NH, weight_VH), got {type(reference).__name__}")
    try:
        argument_checks.check_head(*reference, argument_checks.HeadNames("hidden_NH", "weight_VH", "bias_V"))
    except ValueError as error:
        raise ValueError(f"reference: {error}") from None
    rows, vocab = reference.hidden_NH.shape[0], reference.weight_VH.shape[0]
    if rows != hidden_NH.shape[0]:
        raise ValueError(f"reference has {rows} rows, but hidden_NH has N={hidden_NH.shape[0]}: give it the same rows")
    if vocab != weight_VH.shape[0]:
        raise ValueError(
            f"reference has a vocabulary of {vocab}, but weight_VH has V={weight_VH.shape[0]}: "
            "the full KL needs the same vocabulary"
        )
    if reference.hidden_NH.device != hidden_NH.device:
        raise ValueError(
            f"reference is on {reference.hidden_NH.device}, but hidden_NH on {hidden_NH.device}; "
            "move them to one device"
        )
    return reference


def prepare_reference(
    reference: ReferenceHead, head: Head, weight_VH: Tensor, compute_dtype: torch.dtype, unmasked: Tensor | None
) -> ReferenceRows:
    """Return the reference's head and rows for `Stream`.

    Args:
        reference: checked.
        head: the policy's; its cast weight is shared if the reference has the same weight and no bias.
        weight_VH: weight of the policy's head.
        compute_dtype: dtype of the GEMM operands.
        unmasked: indices of the unmasked rows; None: all.
    """
    if reference.weight_VH is weight_VH and reference.bias_V is None and head.bias_V is None:
        reference_head = head.with_own_buffer()
    else:
        reference_head = Head(reference.weight_VH, reference.bias_V, compute_dtype, head.logits_dtype)
    hidden = reference.hidden_NH if unmasked is None else reference.hidden_NH[unmasked]
    return ReferenceRows(reference_head, reference_head.operand(hidden, compute_dtype))
