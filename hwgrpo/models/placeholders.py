"""Tokens that stand for parts of images, video and sound: no response has one, and no startup check reads one."""

from __future__ import annotations

from typing import Any

import torch

NAMES = ("image_token_id", "video_token_id", "audio_token_id")
BANNED = -1e9
"""Their logit, in sampling and in training: finite, so that entropies are."""


def reads_images(config: Any) -> bool:
    """Return whether a model of this configuration reads images."""
    return getattr(config, "vision_config", None) is not None and isinstance(
        getattr(config, "image_token_id", None), int
    )


def placeholder_ids(config: Any) -> list[int]:
    """Return the tokens in a model's vocabulary that stand for what is no text; none where it reads text alone."""
    if not reads_images(config):
        return []
    vocabulary = config.get_text_config().vocab_size
    values = (getattr(config, name, None) for name in NAMES)
    return sorted({value for value in values if isinstance(value, int) and 0 <= value < vocabulary})


def ban(logits: torch.Tensor, ids: list[int], value: float = BANNED) -> torch.Tensor:
    """Return logits [..., V] in which tokens cannot be drawn; the same tensor where there are none.

    Args:
        logits: of all tokens.
        ids: those tokens.
        value: their logits; 0 where logits are compared in shares of the largest.
    """
    if not ids:
        return logits
    return logits.index_fill(-1, torch.tensor(ids, device=logits.device), value)
