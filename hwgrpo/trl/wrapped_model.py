"""A model that PEFT has wrapped, given as `model`: its base model, and its adapter as settings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from hwgrpo.errors import ConfigError, shown
from hwgrpo.models.lora import has_adapters
from hwgrpo.support.launched_ranks import launched_rank
from hwgrpo.trainer.given_model import write_adapter
from hwgrpo.trl.peft_settings import lora_settings

_TIMEOUT = 1800.0
"""Seconds that the other ranks wait for rank 0 to write an adapter."""


def unwrap(model: Any, peft_config: Any, output: Path) -> tuple[Any, dict[str, Any]]:
    """Return the base model and the settings of its adapters.

    A new adapter, whose product is still 0, gives its LoraConfig. A trained one is written to `output/objects`, and
    continues from there. The wrapped model stays as it is; the base model shares its weights.

    Args:
        model: a model of transformers, or one that PEFT has wrapped.
        peft_config: the argument of the trainer.
        output: the run's folder.

    Raises:
        ConfigError: the adapter has no counterpart, or there are two descriptions of adapters.
    """
    if not has_adapters(model):
        return model, lora_settings(peft_config, getattr(model.config, "model_type", None))
    kind = type(model).__name__
    if peft_config is not None:
        raise ConfigError(f"model={kind} has an adapter, and peft_config is given, too; leave one of them out")
    if len(model.peft_config) > 1:
        raise ConfigError(
            f"model={kind} has the adapters {', '.join(model.peft_config)}; give a model with one adapter"
        )
    name = next(iter(model.peft_config))
    config: Any = model.peft_config[name]
    base = _without_adapters(model)
    if _is_new(model, name):
        return base, lora_settings(config, getattr(base.config, "model_type", None))
    if getattr(config, "bias", "none") != "none":
        raise ConfigError(f"model={kind}: its adapter has bias={shown(config.bias)}; biases stay frozen here")
    folder = write_adapter(model, name, output, launched_rank().rank, _TIMEOUT)
    return base, {"model.lora.rank": config.r, "model.lora.adapter": str(folder)}


def copy_adapter(folder: Path, model: Any) -> None:
    """Copy an adapter that a run has written to the model that PEFT had wrapped."""
    from peft import load_peft_weights, set_peft_model_state_dict

    name = next(iter(model.peft_config))
    set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"), adapter_name=name)


def _without_adapters(model: Any) -> Any:
    """Return the base model with the same tensors; `unload` would take the adapters out of the given object."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(each): each for each in tensors}).unload()


def _is_new(model: Any, name: str) -> bool:
    """Return whether an adapter adds nothing: the second matrix of each layer is 0."""
    second = ("lora_B", "lora_embedding_B")
    return all(
        not torch.any(parameter)
        for key, parameter in model.named_parameters()
        if name in key.split(".") and any(each in key.split(".") for each in second)
    )
