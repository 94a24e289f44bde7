"""How engines that know nothing of settings are made from them."""

from __future__ import annotations

from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.local.engine import LocalEngine


def local(parts: EngineParts) -> LocalEngine:
    """Return the engine that samples with the training model itself, or with a copy in this process."""
    rollout = parts.config.rollout
    apart = parts.apart
    longest = parts.config.data.max_prompt_tokens + rollout.max_response_tokens
    return LocalEngine(
        parts.model if apart is None else apart.replica,
        parts.tokenizer,
        device=parts.device.torch_device,
        compute_dtype=parts.compute_dtype,
        max_sequences=rollout.max_sequences,
        recorder=parts.device.recorder if rollout.graphs else None,
        weights=None if apart is None else apart.trainable,
        gate=parts.gate,
        longest=longest,
    )
