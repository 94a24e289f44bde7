"""Low-rank adapters: new ones, and existing ones that are trained further."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel

from hwgrpo.errors import ConfigError, nearest

if TYPE_CHECKING:
    from hwgrpo.config.schema import LoraConfig

REFERENCE_ADAPTER = "reference"
"""Name of the frozen copy of an adapter that is trained further."""
TRAINED_ADAPTER = "default"
"""Name of the adapter that is trained: the one whose weights peft saves at a folder's top."""


def uses_lora(config: LoraConfig) -> bool:
    """Whether adapters are trained instead of all parameters: new ones (`rank`) or existing ones (`adapter`)."""
    return config.rank > 0 or config.adapter is not None


def rank_of(config: LoraConfig) -> int:
    """Return the rank of the adapters: the existing one's, else `model.lora.rank` (0: none).

    Raises:
        ConfigError: `model.lora.adapter` holds no adapter, or has another rank than `model.lora.rank` says.
    """
    if config.adapter is None:
        return config.rank
    settings = Path(config.adapter).expanduser() / "adapter_config.json"
    if not settings.is_file():
        raise ConfigError(f"model.lora.adapter={config.adapter!r}: there is no adapter_config.json in that folder")
    rank = json.loads(settings.read_text(encoding="utf-8")).get("r")
    if config.rank not in (0, rank):
        raise ConfigError(
            f"model.lora.rank={config.rank}, but the adapter {config.adapter!r} has rank {rank}; leave the rank out"
        )
    return rank


def apply_lora(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Put trainable fp32 low-rank adapters on a model and freeze the rest.

    A new adapter starts as the identity: its random half comes from torch's generator, which the caller seeds. An
    existing one (`model.lora.adapter`) is loaded twice: to be trained, and frozen under the name "reference".

    Raises:
        ConfigError: a target module does not exist, or the adapter cannot be read or does not fit.
    """
    if config.adapter is not None:
        return _load_adapter(model, config)
    assert config.rank > 0
    targets = list(config.target_modules)
    if targets != ["all-linear"]:
        _check_targets(model, targets)
    settings = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  (annotated int, used as a factor)
        lora_dropout=config.dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )
    wrapped = get_peft_model(model, settings, adapter_name=TRAINED_ADAPTER)
    assert isinstance(wrapped, PeftModel)
    return wrapped


def _check_targets(model: PreTrainedModel, targets: list[str]) -> None:
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            short = sorted({name.rsplit(".", 1)[-1] for name in linear})
            near = nearest(target, short)
            hint = f" Did you mean {near!r}?" if near else ""
            raise ConfigError(
                f"model.lora.target_modules={targets}: the model has no linear layer {target!r}; "
                f"it has {', '.join(short)}; or all-linear.{hint}"
            )


def _load_adapter(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    assert config.adapter is not None
    folder = Path(config.adapter).expanduser()
    rank_of(config)  # refuses a folder without an adapter and a rank that contradicts it
    try:
        wrapped = PeftModel.from_pretrained(model, str(folder), adapter_name=TRAINED_ADAPTER, is_trainable=True)
        wrapped.load_adapter(str(folder), adapter_name=REFERENCE_ADAPTER, is_trainable=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"model.lora.adapter={config.adapter!r} cannot be put on this model ({type(model).__name__}): {error}"
        ) from error
    return wrapped
