"""The load-balancing loss of mixture-of-experts models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from hwgrpo.errors import ConfigError


def check_router_loss(coef: float, settings: PreTrainedConfig) -> None:
    """Check that a model has a router for the loss that was asked for.

    Args:
        coef: `model.router_loss_coef`.
        settings: the model's configuration.

    Raises:
        ConfigError: it has none, or one that transformers trains without this loss.
    """
    if coef and not hasattr(settings.get_text_config(), "router_aux_loss_coef"):
        raise ConfigError(
            f"model.router_loss_coef={coef}: a {settings.model_type} model has no load-balancing loss (it has no "
            "experts, or balances them by other means); use model.router_loss_coef=0"
        )


def router_loss(router_logits: Sequence[torch.Tensor], is_token: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the load-balancing loss over all layers, as transformers computes it.

    With E experts it is E times the sum over experts of f * P: f is the share of tokens that go to the expert, P its
    mean probability, both over tokens and layers; top_k where experts share evenly (Fedus et al. 2022, equations 4
    to 6, for top_k choices). Only P has a gradient.

    Args:
        router_logits: per layer [B * L, E].
        is_token: [B, L] bool, False at padding.
        top_k: experts per token.

    Returns:
        [] fp32.
    """
    chosen = torch.cat([logits[is_token.flatten()] for logits in router_logits])
    probability = chosen.float().softmax(dim=-1)
    experts = chosen.shape[-1]
    share = torch.bincount(probability.topk(top_k, dim=-1).indices.flatten(), minlength=experts) / len(chosen)
    return experts * (share * probability.mean(dim=0)).sum()
