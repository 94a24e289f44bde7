"""Sizes of a model, from its configuration alone: a folder's, a shipped one's (`configs/models`) or the hub's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hwgrpo.config.load import recipe_folders
from hwgrpo.config.schema import ModelConfig
from hwgrpo.models import builtin
from hwgrpo.models.loading import model_settings
from hwgrpo.models.lora import rank_of, uses_lora
from hwgrpo.paths import find_model

HUB_NAMES = "hub_names"
"""Key of a shipped configuration: the hub models of that shape."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes that memory and work depend on."""

    architecture: str
    parameters: int
    """Of the model; adapters come on top."""
    trainable: int
    """With LoRA those of the adapters."""
    hidden: int
    layers: int
    vocab: int
    heads: int
    """Query heads."""
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the feed-forward part that a token passes: of all its experts where there are several."""


def planned_settings(config: ModelConfig) -> tuple[PreTrainedConfig, Path | None]:
    """Return the configuration of `model.path`, asking the hub only for models whose shape does not ship.

    Returns:
        The configuration, and the shipped file it is from; None where it is the model's own.

    Raises:
        ConfigError: it cannot be found or read, or is not a causal language model.
    """
    if not config.path.startswith(builtin.PREFIX) and find_model(config.path, "model.path") is None:
        file = shipped_shapes().get(config.path)
        if file is not None:
            return AutoConfig.from_pretrained(file), file
    return model_settings(config), None


@cache
def shipped_shapes() -> dict[str, Path]:
    """Return the files below `configs/models` by the hub names of the models that have this shape."""
    files = [file for folder in recipe_folders() for file in sorted((folder / "models").glob("*.json"))]
    return {name: file for file in files for name in json.loads(file.read_text(encoding="utf-8"))[HUB_NAMES]}


def model_shape(config: ModelConfig, settings: PreTrainedConfig) -> ModelShape:
    """Work a model's sizes out on the meta device; its weights are not touched.

    With LoRA the trainable parameters are those of rank-r adapters on the linear layers named.

    Args:
        config: the run's `model` settings.
        settings: the model's transformers configuration.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, trust_remote_code=config.trust_remote_code)
    total = sum(p.numel() for p in model.parameters())
    trainable = total
    lora = config.lora
    if uses_lora(lora):
        rank = rank_of(lora)
        head = model.get_output_embeddings()
        everywhere = list(lora.target_modules) == ["all-linear"]
        layers = [
            module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
            and module is not head
            and (everywhere or any(name == t or name.endswith(f".{t}") for t in lora.target_modules))
        ]
        trainable = sum(rank * (layer.in_features + layer.out_features) for layer in layers)
    text = settings.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 1
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    experts = getattr(text, "num_experts_per_tok", None)
    if experts:
        width = experts * (getattr(text, "moe_intermediate_size", None) or width)
    return ModelShape(
        architecture=type(model).__name__,
        parameters=total,
        trainable=trainable,
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        vocab=text.vocab_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        intermediate=width,
    )
