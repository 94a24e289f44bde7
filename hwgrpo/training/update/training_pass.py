"""One forward and backward pass of an update, with the reference's forward where the KL is over the full vocabulary."""

from __future__ import annotations

import torch
from hwgrpo_kernels import ReferenceHead, TokenLoss
from torch import Tensor

from hwgrpo.algorithms.policy_loss import PolicyLoss
from hwgrpo.training.policy.micro_batch import MicroBatch
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.strategies.strategy import Strategy


def forward_backward(
    strategy: Strategy, micro: MicroBatch, loss_fn: PolicyLoss, router_weight: float, reference: Reference | None
) -> TokenLoss:
    """Add the gradient of a micro-batch's loss to the policy's.

    The full KL needs hidden states and LM head of the reference beside those of the policy. A copy has a head of its
    own, whose weights a strategy that shards gathers for its forward only: the policy's pass is run within it, in
    place of that head. Adapters leave the head as it is, so hidden states are enough.

    Args:
        strategy: has the wrapped policy.
        micro: on the policy's device.
        loss_fn: the loss.
        router_weight: factor of the load-balancing loss.
        reference: the reference model, if the loss has the full KL to it; it computes without gradient or dropout.
    """
    if reference is None:
        return _train(strategy, micro, loss_fn, router_weight, None)
    if reference.kind == "copy":
        results: list[TokenLoss] = []
        with torch.no_grad():
            reference.policy(
                micro, visit=lambda head: results.append(_train(strategy, micro, loss_fn, router_weight, head))
            )
        return results[0]
    policy = reference.policy
    with torch.no_grad(), reference.active():
        hidden = policy.eval()(micro, visit=lambda head: None)
    policy.train()
    return _train(strategy, micro, loss_fn, router_weight, hidden)


def _train(
    strategy: Strategy,
    micro: MicroBatch,
    loss_fn: PolicyLoss,
    router_weight: float,
    reference: ReferenceHead | Tensor | None,
) -> TokenLoss:
    with torch.enable_grad():
        result = strategy.module(micro, loss_fn, router_weight, reference=reference)
        strategy.backward(result.loss)
    return result
