"""What an update has to do: tokens that pass through the model, and floating-point operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.update.flops import training_work


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
    """Return the floating-point operations of an update's products with weights, or None if unknown.

    The backbone's for every token fed, padding included, and the LM head's for response tokens only (`training_work`).
    Attention scores and what gradient checkpointing computes again are not counted.
    """
    work = training_work(policy)
    if work is None:
        return None
    return round(work.per_token * tokens.fed + work.per_response_token * tokens.trained)
