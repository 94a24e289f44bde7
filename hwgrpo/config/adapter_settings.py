"""The settings of adapters, read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo.errors import ConfigError

if TYPE_CHECKING:
    from hwgrpo.config.schema import LoraConfig


def adapter_settings(folder: str) -> Mapping[str, Any] | None:
    """Return the contents of an adapter's adapter_config.json; None if the folder has none.

    Raises:
        ConfigError: it cannot be read.
    """
    file = Path(folder).expanduser() / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.lora.adapter={folder!r}: {file.name} cannot be read: {error}") from error
    if not isinstance(settings, Mapping):
        raise ConfigError(f"model.lora.adapter={folder!r}: {file.name} is no JSON object")
    return settings


def uses_dora(config: LoraConfig) -> bool:
    """Return whether new adapters are DoRA's, or an existing one is."""
    if config.adapter is None:
        return config.rank > 0 and config.dora
    return bool((adapter_settings(config.adapter) or {}).get("use_dora"))


def refuse_dora(config: LoraConfig, other: str, reason: str) -> None:
    """Raise ConfigError if adapters are DoRA's.

    Args:
        config: the adapters.
        other: the setting that has no support, as `key=value`.
        reason: why.
    """
    if uses_dora(config):
        existing = f"the DoRA adapter model.lora.adapter={config.adapter!r}"
        own = "model.lora.dora=true" if config.adapter is None else existing
        raise ConfigError(f"{own} with {other}: {reason}; use rollout.engine=local without quantization, or plain LoRA")
