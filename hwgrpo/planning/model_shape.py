"""Sizes of a model, from its configuration alone: in a folder, shipped (`configs/models`), or on the hub."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
from transformers import AutoConfig, PreTrainedConfig

from hwgrpo.config.schema import ModelConfig
from hwgrpo.config.shipped_files import recipe_folders
from hwgrpo.models import builtin
from hwgrpo.models.frozen_dtype import castable_parameters
from hwgrpo.models.layer_values import head_sizes, largest_value
from hwgrpo.models.layers import decoder_layers
from hwgrpo.models.loading import auto_class, load_model_config
from hwgrpo.models.lora import apply_lora, rank_of, uses_lora, without_weights
from hwgrpo.models.placeholders import reads_images
from hwgrpo.models.quantization import quantizable_weights
from hwgrpo.models.tensor_parallel import shard_dims
from hwgrpo.models.vision import OTHER, freeze_vision, unsupported_reason, vision_modules, vision_parameters
from hwgrpo.planning.tower_shape import TowerShape, tower_shape
from hwgrpo.support.paths import find_model
from hwgrpo.training.strategies.parameter_shapes import ParameterShape, ParameterUnit, count_elements
from hwgrpo.training.update.flops import ACTIVATED_EXPERTS, EXPERTS, first_of

HEAD_NORMS = frozenset({"q_norm", "k_norm"})
"""Names of the norms of queries and keys in models."""

HUB_NAMES = "hub_names"
"""Key of a shipped configuration: the hub models of that shape."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine its memory and FLOPs; where layers differ, the largest."""

    architecture: str
    units: tuple[ParameterUnit, ...]
    """Decoder layers and the rest, with their adapters."""
    hidden: int
    layers: int
    vocab: int
    heads: int
    """Query heads."""
    kv_heads: int
    head_dim: int
    """Of queries and keys."""
    value_dim: int
    """Of values."""
    intermediate: int
    """Width of the feed-forward part per token: the sum over activated experts, if there are experts."""
    norms: int
    """Norms of hidden states in a layer."""
    head_norms: bool
    """Queries and keys are normed, too."""
    latent: int = 0
    """Width of the latents of latent attention; 0 without it."""
    expert_parameters: int = 0
    """Parameters of all routed experts, in all layers."""
    expert_share: float = 1.0
    """Share of a layer's experts that a token activates."""
    published: torch.dtype = torch.float32
    """Dtype of the weights, as its configuration says."""
    vision_parameters: int = 0
    """Parameters of the tower and the projector of a vision-language model, which decode steps do not read."""
    other_parameters: int = 0
    """Parameters that neither images nor text pass, as of a tower of sound, which decode steps do not read, either."""
    tower: TowerShape | None = None
    """Of a vision-language model."""

    @cached_property
    def trained_units(self) -> tuple[ParameterUnit, ...]:
        """The units with their trained parameters: all that are not frozen, or only the adapters if there are some."""
        adapters = tuple(unit.only(adapters=True) for unit in self.units)
        trained = tuple(unit.where(lambda parameter: not parameter.is_frozen) for unit in self.units)
        return adapters if count_elements(adapters) else tuple(unit for unit in trained if unit.parameters)

    @cached_property
    def sharded_units(self) -> tuple[ParameterUnit, ...]:
        """The units without quantized matrices, which no strategy shards."""
        return tuple(unit.where(lambda parameter: not parameter.is_quantized) for unit in self.units)

    @cached_property
    def parameters(self) -> int:
        """Number of the model's parameters, without adapters."""
        return count_elements([unit.only(adapters=False) for unit in self.units])

    @cached_property
    def trainable(self) -> int:
        """Number of trained parameters; with LoRA those of the adapters."""
        return count_elements(self.trained_units)

    @cached_property
    def largest_layer(self) -> int:
        """Number of parameters of the largest layer, without adapters and quantized matrices."""
        layers = [unit.where(lambda p: not (p.is_adapter or p.is_quantized)) for unit in self.units if unit.is_layer]
        return max(unit.count for unit in layers)

    @cached_property
    def has_castable_head(self) -> bool:
        """Whether the LM head may have the compute dtype: it is not tied to embeddings that may not."""
        others = [p for unit in self.units if not unit.is_layer for p in unit.parameters]
        return any(p.is_castable and p.shape == (self.vocab, self.hidden) for p in others)


def planned_settings(config: ModelConfig) -> tuple[PreTrainedConfig, Path | None]:
    """Return the configuration of `model.path`, asking the hub only for models whose shape does not ship.

    Returns:
        The configuration, and its shipped file; None if it is the model's own.

    Raises:
        ConfigError: it cannot be found or read, or is not a causal language model.
    """
    if not config.path.startswith(builtin.PREFIX) and find_model(config.path, "model.path") is None:
        file = shipped_shapes().get(config.path)
        if file is not None:
            return AutoConfig.from_pretrained(file), file
    return load_model_config(config), None


@cache
def shipped_shapes() -> dict[str, Path]:
    """Return hub name -> file below `configs/models` of that model's shape."""
    files = [file for folder in recipe_folders() for file in sorted((folder / "models").glob("*.json"))]
    return {name: file for file in files for name in json.loads(file.read_text(encoding="utf-8"))[HUB_NAMES]}


def model_shape(config: ModelConfig, settings: PreTrainedConfig) -> ModelShape:
    """Determine a model's sizes on the meta device, without its weights; once for the same arguments.

    Args:
        config: the run's `model` settings.
        settings: the model's transformers configuration.
    """
    rank = rank_of(config.lora) if uses_lora(config.lora) else 0  # an adapter's file may change
    key = repr((config, settings, rank))
    if key not in _known:
        _known[key] = _determine(config, settings)
    return _known[key]


_known: dict[str, ModelShape] = {}
"""Arguments -> shape: making adapters takes a second, and plans compare many settings of one model."""


def _determine(config: ModelConfig, settings: PreTrainedConfig) -> ModelShape:
    with torch.device("meta"):
        model = auto_class(settings).from_config(settings, trust_remote_code=config.trust_remote_code)
    text = settings.get_text_config()
    heads = largest_value(text, "num_attention_heads") or 1
    width = largest_value(text, "intermediate_size") or 4 * text.hidden_size
    of_parts = Counter[str]()
    for part, _, parameter in vision_parameters(model):
        of_parts[part] += parameter.numel()
    experts, met = first_of(text, EXPERTS), first_of(text, ACTIVATED_EXPERTS)
    if met:
        width = (met + (largest_value(text, "n_shared_experts") or 0)) * (
            largest_value(text, "moe_intermediate_size") or width
        )
    norms, head_norms = _norms(model)
    in_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    size = max(head_sizes(text)) or text.hidden_size
    units = parameter_units(model, config)
    return ModelShape(
        architecture=type(model).__name__,
        units=units,
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        vocab=text.vocab_size,
        heads=heads,
        kv_heads=largest_value(text, "num_key_value_heads") or heads,
        head_dim=largest_value(text, "qk_head_dim") or size,
        value_dim=largest_value(text, "v_head_dim") or size,
        intermediate=width,
        norms=norms,
        head_norms=head_norms,
        latent=(largest_value(text, "kv_lora_rank") or 0) + (largest_value(text, "qk_rope_head_dim") or 0),
        expert_parameters=in_experts,
        expert_share=met / experts if met and experts else 1.0,
        published=getattr(settings, "dtype", None) or torch.float32,
        vision_parameters=of_parts["tower"] + of_parts["projector"],
        other_parameters=of_parts[OTHER],
        tower=tower_shape(model) if reads_images(settings) and not unsupported_reason(settings) else None,
    )


def parameter_units(model: Any, config: ModelConfig) -> tuple[ParameterUnit, ...]:
    """Return the parameters of a model by decoder layer, and those outside layers; equal layers are one unit.

    Args:
        model: a transformers causal LM on the meta device; adapters are added to it, tied parameters count once.
        config: the run's `model` settings.
    """
    lora = config.lora
    cut_dims = shard_dims(model)
    quantized = set(quantizable_weights(model).values()) if config.quantize != "none" else set[Any]()
    castable = set(castable_parameters(model)) - quantized
    adapted = uses_lora(lora)
    frozen = set[Any]()
    if not adapted and reads_images(model.config):
        freeze_vision(model, config.train_vision)
        frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    if adapted:
        # peft warns of patterns that it made for experts
        with without_weights(), catch_warnings(action="ignore", category=RuntimeWarning):
            # an existing adapter has the shape of a new one of its rank
            apply_lora(model, replace(lora, rank=rank_of(lora), adapter=None))
    prefixes = {layer: f"{name}." for name, layer in model.named_modules()}
    # a tower is gathered with the rest: ranks encode different numbers of images
    tower = vision_modules(model, "all")
    layers = [layer for layer in decoder_layers(model) if layer not in tower]
    layer_of = {parameter: layer for layer in layers for parameter in layer.parameters()}
    by_layer: dict[Any, list[ParameterShape]] = {}
    for name, parameter in model.named_parameters():
        layer = layer_of.get(parameter)
        by_layer.setdefault(layer, []).append(
            ParameterShape(
                name=name.removeprefix(prefixes.get(layer, "")).replace("base_layer.", ""),
                shape=tuple(parameter.shape),
                is_adapter=adapted and parameter.requires_grad,
                tensor_dim=None if layer is None else cut_dims.get(name),
                is_castable=parameter in castable,
                is_quantized=parameter in quantized,
                is_frozen=parameter in frozen,
            )
        )
    alike = Counter(ParameterUnit(tuple(parameters), layer is not None) for layer, parameters in by_layer.items())
    return tuple(replace(unit, copies=copies) for unit, copies in alike.items())


def _norms(model: Any) -> tuple[int, bool]:
    """Return a layer's norms of hidden states, and whether it norms heads."""
    hidden = model.config.get_text_config().hidden_size
    layers: Any = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=_parameters)
    # the last layer is one of a mixture of experts where the first few are not
    widths = {
        name.rpartition(".")[2]: module.weight.shape[0]
        for name, module in layers[-1].named_modules()
        if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None
    }
    norms = sum(width == hidden for name, width in widths.items() if name not in HEAD_NORMS)
    return norms, bool(HEAD_NORMS & widths.keys())


def _parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
