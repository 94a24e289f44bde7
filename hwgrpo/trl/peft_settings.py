"""A PEFT LoraConfig, a BitsAndBytesConfig and a model object -> settings, or a refusal with the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hwgrpo.errors import ConfigError, shown
from hwgrpo.trl.grpo_config import note

_SAME = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora")
_IGNORED = (
    *("task_type", "inference_mode", "base_model_name_or_path", "revision", "peft_type", "peft_version"),
    *("auto_mapping", "runtime_config", "ephemeral_gpu_offload"),
)
"""Fields of LoraConfig that change neither the parameters nor the gradient."""
REMEDY = (
    'give its name: model="NAME", quantization_config=BitsAndBytesConfig(load_in_4bit=True, '
    'bnb_4bit_quant_type="nf4"), peft_config=LoraConfig(...)'
)


def lora_settings(config: Any, model_type: str | None) -> dict[str, Any]:
    """Return the settings of adapters.

    Args:
        config: a LoraConfig; None trains all parameters.
        model_type: the model's family, whose default of PEFT replaces target_modules=None; None: not known.

    Raises:
        ConfigError: another kind of adapter, or a field without a counterpart.
    """
    if config is None:
        return {}
    from peft import LoraConfig

    if type(config) is not LoraConfig:
        raise ConfigError(f"peft_config={type(config).__name__}: adapters are low-rank ones here; give a LoraConfig")
    default = LoraConfig()
    for field in dataclasses.fields(config):
        value, usual = getattr(config, field.name), getattr(default, field.name, None)
        if field.name in (*_SAME, *_IGNORED) or value == usual or not (value or usual):
            continue
        raise ConfigError(
            f"peft_config.{field.name}={shown(value)} has no counterpart here; leave it out "
            f"(mapped: {', '.join(_SAME)})"
        )
    return {
        "model.lora.rank": config.r,
        "model.lora.alpha": float(config.lora_alpha),
        "model.lora.dropout": config.lora_dropout,
        "model.lora.target_modules": _targets(config.target_modules, model_type),
        "model.lora.rslora": config.use_rslora,
        "model.lora.dora": config.use_dora,
    }


def _targets(targets: Any, model_type: str | None) -> list[str]:
    if targets is None:
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

        targets = DEFAULTS.get(model_type or "", {"q_proj", "v_proj"})
    if isinstance(targets, str):
        return [targets if targets == "all-linear" else f"re:{targets}"]
    return sorted(targets)


def quantize_setting(config: Any, *, adapters: bool) -> dict[str, Any]:
    """Return the setting of a BitsAndBytesConfig; None is none.

    Raises:
        ConfigError: another kind of quantization, or there are no adapters to train.
    """
    if config is None:
        return {}
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    if not (values.get("load_in_4bit") or values.get("load_in_8bit")):
        raise ConfigError(f"quantization_config={type(config).__name__}: only bitsandbytes' 4 and 8 bits; {REMEDY}")
    if not adapters:
        raise ConfigError("quantization_config: quantized weights are frozen; give peft_config=LoraConfig(...), too")
    if not values.get("load_in_4bit"):
        return {"model.quantize": "int8"}
    kind = values.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        note(f"quantization_config.bnb_4bit_quant_type={kind}: 4 bits are nf4 here, whose rounding errors are smaller")
    return {"model.quantize": "nf4"}


def check_model(model: Any) -> None:
    """Check that a model given as an object has no quantized weights.

    Raises:
        ConfigError: it has; the message has the remedy.
    """
    wrapped = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    base = model.get_base_model() if wrapped else model
    quantized = any(getattr(base, each, False) for each in ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit"))
    kind = type(model).__name__
    if quantized:
        by = " wrapped by LoRA" if wrapped else ""
        raise ConfigError(f"model={kind}{by} is quantized by bitsandbytes, whose kernels are not used here; {REMEDY}")
