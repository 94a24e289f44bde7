"""Updates whose KL is over the full vocabulary, of policies that have left their reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hwgrpo.config import Config
from hwgrpo.models.lora import apply_lora
from hwgrpo.training.policy.layouts import PADDED, Layout
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.policy.reference_model import build_reference
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update.policy_update import PolicyUpdate
from tests.support.models.tiny import settings

EXACT = ("algorithm.kl.estimator=exact", "algorithm.kl.coef=0.3")
LORA = ("model.lora.rank=2",)


def exact_update(
    strategy: Strategy,
    make: Callable[[], Any],
    words: Sequence[str] = (),
    layout: Layout = PADDED,
    *,
    leaves: bool = True,
) -> PolicyUpdate:
    """Return the update of a policy by a prepared strategy, with its reference.

    Args:
        strategy: not yet prepared.
        make: makes the model, the same on each call.
        words: settings besides EXACT.
        layout: of micro-batches.
        leaves: whether the trained weights have left the reference.
    """
    config = settings(*EXACT, *words)
    policy = policy_of(make(), config)
    strategy.prepare(config)
    reference = build_reference(policy, config.algorithm.kl, config.model.lora)
    assert reference is not None
    if leaves:
        moved(policy)
    strategy.wrap(policy, config)
    if reference.policy is not policy:
        strategy.wrap_reference(reference.policy)
    return PolicyUpdate(config, strategy, policy, torch.device("cpu"), layout, total_updates=3, reference=reference)


def policy_of(model: Any, config: Config) -> PolicyModel:
    if config.model.lora.rank or config.model.lora.adapter:
        model = apply_lora(model, config.model.lora)
    options = HeadOptions(temperature=config.rollout.temperature, chunk_rows=config.kernels.chunk_rows)
    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    return PolicyModel(model, compute_dtype=dtype, options=options)


@torch.no_grad()
def moved(model: Any) -> Any:
    """Move a model's trained weights by about a tenth of their size, or of 1 where they are 0; return the model."""
    g = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            scale = 0.1 * (float(parameter.std()) or 1.0)
            parameter.add_(scale * torch.randn(parameter.shape, generator=g))
    return model
