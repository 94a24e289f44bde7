"""Quantized weights in a model's files: formats that are dequantized when they are loaded; all others are refused."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from hwgrpo.errors import ConfigError

DEQUANTIZED = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
"""Methods whose weights transformers dequantizes on any device (DeepSeek-V3's FP8, GPT-OSS's MXFP4) -> its settings."""
KEYS = ("quantization_config", "compression_config")
"""Keys of a model's configuration with the format of its weights."""


def stored_method(settings: PreTrainedConfig) -> str | None:
    """Return the method by which a model's files are quantized, as its configuration says; None if they are not."""
    for each in (settings, settings.get_text_config()):
        for key in KEYS:
            found: Any = getattr(each, key, None)
            if found:
                values = found if isinstance(found, dict) else found.to_dict()
                by_bitsandbytes = values.get("load_in_4bit") or values.get("load_in_8bit")
                method = values.get("quant_method") or ("bitsandbytes" if by_bitsandbytes else "an unknown method")
                return str(getattr(method, "value", method))
    return None


def check_stored(path: str, settings: PreTrainedConfig) -> None:
    """Check that a model's weights are not quantized, or are dequantized when they are loaded.

    Args:
        path: `model.path`, for messages.
        settings: the model's configuration.

    Raises:
        ConfigError: they could neither be trained nor saved.
    """
    method = stored_method(settings)
    if method is not None and method not in DEQUANTIZED:
        raise ConfigError(
            f"model.path={path!r} has weights quantized by {method}, which can be neither trained nor saved: set "
            "model.path to the original model, whose weights are not quantized; with model.quantize=nf4 and "
            "model.lora.rank=16 its frozen weights take as little memory"
        )


def loading_options(settings: PreTrainedConfig) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that dequantize a model's weights; none if nothing is quantized."""
    method = stored_method(settings)
    return {} if method is None else {"quantization_config": DEQUANTIZED[method](dequantize=True)}


@torch.no_grad()
def finish_dequantization(model: Any, dtype: torch.dtype) -> None:
    """Give a dequantized model one dtype, and let it be saved as a model that never was quantized."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    model._weight_conversions = None  # transformers would reverse the dequantization when it saves
    record_difference(model, quantization_config=None)


def record_difference(model: Any, **values: Any) -> None:
    """Record values of a model's configuration that differ from those in its folder, which some engines read."""
    model.differs_from_folder = getattr(model, "differs_from_folder", {}) | values


def dequantization_note(settings: PreTrainedConfig) -> str | None:
    """Return that the weights are dequantized, or None if they are not quantized."""
    method = stored_method(settings)
    if method is None:
        return None
    return (
        f"the model's files are quantized ({method}): its weights are dequantized when they are loaded, trained as "
        "they are then, and saved unquantized"
    )
