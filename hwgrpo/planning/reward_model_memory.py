"""The memory of reward models in the trainer's process, from their configurations alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hwgrpo.config import Config
from hwgrpo.config.schema import ModelConfig, RewardConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models.layer_values import largest_value
from hwgrpo.models.loading import resolve_model_path
from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.rewards.models.placement import check_placement
from hwgrpo.rewards.models.pretrained import DTYPES, PROCESS_KINDS, Pretrained

AUTO_CLASSES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "reward_model": lambda kwargs: "AutoModelForSequenceClassification",
    "online_reward_model": lambda kwargs: "AutoModelForSequenceClassification",
    "process_reward_model": lambda kwargs: PROCESS_KINDS.get(kwargs.get("kind", "token_classification"), "AutoModel"),
}
"""Reward -> its model's auto class. Rewards that are not here load no model that a plan counts."""


@dataclass(frozen=True)
class RewardModelSize:
    """Sizes of a reward model."""

    parameters: int
    dtype: torch.dtype
    """Of the weights."""
    hidden: int
    intermediate: int
    """Width of the feed-forward part."""
    longest: int | None
    """Most tokens that it reads; None: not known."""
    layers: int = 1

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return self.parameters * self.dtype.itemsize

    def activations(self, tokens: int, longest: int) -> int:
        """Estimate the bytes of a forward pass without gradients beside the weights.

        One layer's at a time: residual, normed input and three vectors of the feed-forward part's width per token, and
        a mask of one byte per token and key.

        Args:
            tokens: tokens of a batch, padding included.
            longest: tokens of its longest text.
        """
        return tokens * (self.dtype.itemsize * (2 * self.hidden + 3 * self.intermediate) + longest)


def add_reward_models(config: Config, prompts: int, always: dict[str, int], host: dict[str, int]) -> dict[str, int]:
    """Add the weights of reward models to `always` or `host`, and return the device's memory while they score.

    Models score one after the other. A text is as long as prompt and response of the policy at the most.

    Args:
        config: the run's settings.
        prompts: prompts of a step on this device.
        always: bytes on the device at any time, by component.
        host: bytes in the host's memory; `always` itself where the device is the host.
    """
    scoring: dict[str, int] = {}
    for name, kwargs, size in _models(config.reward, config.model):
        if isinstance(size, str):
            continue
        part = f"{name} ({str(size.dtype).removeprefix('torch.')})"
        trained = name.startswith("online")
        on_host = kwargs.get("place") == "cpu" and host is not always
        offloads = kwargs.get("offload", False) and host is not always
        memory = host if on_host or offloads else always
        memory[part] = size.weights
        if trained:
            memory[f"{name}: gradients and optimizer states"] = 3 * size.weights
        if on_host:
            continue
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        longest = min(longest, kwargs.get("max_length") or size.longest or longest)
        tokens = min(prompts * config.rollout.n * longest, max(longest, kwargs.get("tokens_per_batch", 16384)))
        kept = size.layers if trained else 1
        each = {f"{name}: activations of {tokens:,} tokens, about": kept * size.activations(tokens, longest)}
        if offloads:
            each[f"{part}, while it scores"] = size.weights
        scoring = max(scoring, each, key=lambda parts: sum(parts.values()))
    return scoring


def uncounted_reward_models(reward: RewardConfig, model: ModelConfig) -> list[str]:
    """Return a line for each reward model whose sizes cannot be found, with the reason."""
    return [f"not counted: {name}: {size}" for name, _, size in _models(reward, model) if isinstance(size, str)]


def _models(reward: RewardConfig, model: ModelConfig) -> list[tuple[str, Mapping[str, Any], RewardModelSize | str]]:
    """Return name, arguments and sizes of each reward model; the reason where the sizes cannot be found."""
    found = []
    for number, entry in enumerate(reward.functions):
        if entry.name in AUTO_CLASSES:
            kwargs = dict(entry.kwargs)
            if entry.name == "online_reward_model":
                kwargs |= {"path": kwargs.get("path") or resolve_model_path(model.path), "dtype": "float32"}
            found.append((f"{entry.name} {number}", kwargs, _size(f"reward.functions[{number}]", entry.name, kwargs)))
    return found


def _size(key: str, name: str, kwargs: Mapping[str, Any]) -> RewardModelSize | str:
    checks = Kwargs(key)
    try:
        check_placement(
            checks,
            kwargs.get("place", "run"),
            kwargs.get("offload", False),
            kwargs.get("tokens_per_batch", 16384),
            kwargs.get("max_length"),
        )
        checks.text("path", kwargs.get("path"))
        checks.choice("dtype", kwargs.get("dtype", "auto"), DTYPES)
    except ConfigError as error:
        return str(error)
    revision, trusted = kwargs.get("revision"), kwargs.get("trust_remote_code") is True
    return _read_size(key, kwargs["path"], revision, trusted, AUTO_CLASSES[name](kwargs), kwargs.get("dtype", "auto"))


@cache
def _read_size(
    key: str, path: str, revision: str | None, trusted: bool, kind: str, dtype: str
) -> RewardModelSize | str:
    try:
        pretrained = Pretrained(Kwargs(key), path, revision, trusted)
        settings = pretrained.config()
        model = pretrained.without_weights(kind, settings)
    except ConfigError as error:
        return str(error)
    text = settings.get_text_config()
    hidden = getattr(text, "hidden_size", 0)
    return RewardModelSize(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=(getattr(settings, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype),
        hidden=hidden,
        intermediate=largest_value(text, "intermediate_size") or 4 * hidden,
        layers=getattr(text, "num_hidden_layers", 1),
        longest=getattr(text, "max_position_embeddings", None),
    )
