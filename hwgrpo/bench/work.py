"""What an update has to do: tokens that pass through the model, and floating-point operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from hwgrpo.training.policy.policy_model import PolicyModel


@dataclass
class Tokens:
    """Tokens of forward passes."""

    fed: int = 0
    """That went through the backbone, prompts and padding included."""
    trained: int = 0
    """Response tokens that met the LM head."""


@contextmanager
def counted_tokens(policy: PolicyModel) -> Iterator[Tokens]:
    """Count the tokens of the policy's forward passes within the block."""
    tokens = Tokens()

    def count(_: nn.Module, arguments: tuple) -> None:
        tokens.fed += arguments[0].input_ids.numel()
        tokens.trained += arguments[0].targets.numel()

    hook = policy.register_forward_pre_hook(count)
    try:
        yield tokens
    finally:
        hook.remove()


def update_flops(policy: PolicyModel, tokens: Tokens) -> int | None:
    """Return the floating-point operations of the matrix products of an update, or None if unknown.

    6 per weight and token where the weight is trained (2 forward, 2 for the gradient of its input, 2 for its own), 4
    where it is frozen; the backbone's for every token fed, the LM head's for response tokens only. Attention scores,
    norms and what gradient checkpointing computes again are not counted. Mixtures of experts use each weight for some
    tokens, which is not known here. Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1.
    """
    base = policy.base
    if getattr(base.config.get_text_config(), "num_experts_per_tok", None):
        return None
    head = base.get_output_embeddings().weight
    tables = {id(module.weight) for module in policy.modules() if isinstance(module, nn.Embedding)}
    per_fed_token = 0
    for weight in policy.parameters():
        if weight is head or id(weight) in tables or weight.ndim < 2:
            continue
        if weight.ndim > 2:
            return None
        per_fed_token += (6 if weight.requires_grad else 4) * weight.numel()
    per_response_token = (6 if head.requires_grad else 4) * head.numel()
    return per_fed_token * tokens.fed + per_response_token * tokens.trained
