"""Mixture-of-experts models: how a configuration names the experts, and the load-balancing loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from hwgrpo.errors import ConfigError
from hwgrpo.models.layer_values import largest_value
from hwgrpo.models.lm_head import backbone
from hwgrpo.models.placeholders import placeholder_ids
from hwgrpo.models.rounding import check_ids

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names in model configurations for the number of experts."""


def has_experts(text: Any) -> bool:
    """Return whether a model is a mixture of experts, by its text configuration."""
    return any(largest_value(text, name) for name in EXPERTS)


def check_router_loss(coef: float, settings: PreTrainedConfig) -> None:
    """Check by a model's configuration that it has a router for the requested loss.

    Args:
        coef: `model.router_loss_coef`.
        settings: the model's configuration.

    Raises:
        ConfigError: it has none, or one that transformers trains without this loss.
    """
    text = settings.get_text_config()
    parts = (
        (text, "router_aux_loss_coef"),
        (text, "aux_loss_coef"),
        (getattr(text, "ffn_config", None), "moe_loss_weight"),
    )
    if coef and not any(hasattr(part, name) for part, name in parts):
        raise _without(coef, f"a {settings.model_type} model")


def check_router(coef: float, base: Any) -> None:
    """Check that the loss of a loaded model is the one computed here, by its own on a few tokens.

    Args:
        coef: `model.router_loss_coef`; with 0 nothing is computed.
        base: the causal LM, on its device.

    Raises:
        ConfigError: the model has no such loss, or another one.
    """
    if not coef:
        return
    name = type(base).__name__
    embeddings = base.get_input_embeddings().weight
    ids = check_ids(embeddings.shape[0], 8, placeholder_ids(base.config)).to(embeddings.device)[None]
    was_training = base.training
    base.eval()
    with torch.no_grad():
        layers = getattr(backbone(base)(input_ids=ids, output_router_logits=True, use_cache=False), "router_logits", ())
        if not layers:
            raise _without(coef, name)
        shapes = {tuple(layer.shape) for layer in layers}
        if len(shapes) > 1 or len(next(iter(shapes))) != 2:
            raise ConfigError(
                f"model.router_loss_coef={coef}: the routers of {name} do not give one number per token and expert "
                f"(they give {', '.join(map(str, sorted(shapes)))}); use model.router_loss_coef=0"
            )
        own = getattr(base(input_ids=ids, output_router_logits=True, use_cache=False), "aux_loss", None)
        ours = router_loss(layers, torch.ones_like(ids, dtype=torch.bool), experts_per_token(base))
    base.train(was_training)
    if not isinstance(own, torch.Tensor):
        raise _without(coef, name)
    if not abs(float(own - ours)) <= 1e-3 * float(ours):
        raise ConfigError(
            f"model.router_loss_coef={coef}: {name} has its own load-balancing loss, {float(own):.4g} where the "
            f"one that is built in gives {float(ours):.4g}; use model.router_loss_coef=0"
        )


def experts_per_token(base: Any) -> int:
    """Return how many experts a causal LM sends a token to."""
    return int(getattr(base, "num_experts_per_tok", None) or base.config.get_text_config().num_experts_per_tok)


def router_loss(
    router_logits: Sequence[torch.Tensor], is_token: torch.Tensor, top_k: int, group: Any = None
) -> torch.Tensor:
    """Return the load-balancing loss over all layers, as transformers computes it.

    With E experts it is E times the sum over experts of f * P: f is the share of tokens that go to the expert, P its
    mean probability, both over tokens and layers; top_k where experts share evenly (Fedus et al. 2022, equations 4
    to 6, for top_k choices). Only P has a gradient.

    Args:
        router_logits: per layer [B * L, E].
        is_token: [B, L] bool, False at padding.
        top_k: experts per token.
        group: process group whose ranks hold the tokens together; None: they are all here.

    Returns:
        [] fp32; with a group this rank's part, and the loss is the sum of its ranks'.
    """
    chosen = torch.cat([logits[is_token.flatten()] for logits in router_logits])
    probability = chosen.float().softmax(dim=-1)
    experts = chosen.shape[-1]
    choices = torch.bincount(probability.topk(top_k, dim=-1).indices.flatten(), minlength=experts)
    counts = torch.cat([choices, choices.new_tensor([len(chosen)])])
    if group is not None:
        dist.all_reduce(counts, group=group)
    share, tokens = counts[:-1] / counts[-1], counts[-1]
    return experts * (share * probability.sum(dim=0) / tokens).sum()


def _without(coef: float, name: str) -> ConfigError:
    return ConfigError(
        f"model.router_loss_coef={coef}: {name} has no load-balancing loss (it has no experts, or balances them by "
        "other means); use model.router_loss_coef=0"
    )
