"""Low-rank adapters: new ones, and existing ones that are trained further."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from hwgrpo.config.adapter_settings import adapter_settings
from hwgrpo.errors import ConfigError, nearest
from hwgrpo.models.meta_device import META
from hwgrpo.models.vision import vision_modules

if TYPE_CHECKING:
    from peft import PeftModel
    from typing_extensions import TypeIs

    from hwgrpo.config.schema import LoraConfig

REFERENCE_ADAPTER = "reference"
"""Name of the frozen copy of an adapter that is trained further."""
ALL_LINEAR = ["all-linear"]
"""Target of adapters on every linear layer that text passes but the LM head (and `READ_PAST_ADAPTERS`)."""
PATTERN = "re:"
"""Begins a target that is a regular expression."""
OUT_PROJ = "out_proj"
READ_PAST_ADAPTERS = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
"""Model types whose fused kernels read the weight of `OUT_PROJ`, past its adapter, which peft therefore refuses."""
TRAINED_ADAPTER = "default"
"""Name of the adapter that is trained: the one whose weights peft saves at a folder's top."""


def has_adapters(model: Any) -> TypeIs[PeftModel]:
    """Return whether peft wraps a model; only models with adapters import peft, which takes a third of a second."""
    return hasattr(model, "get_base_model")


def uses_lora(config: LoraConfig) -> bool:
    """Whether adapters are trained instead of all parameters: new ones (`rank`) or existing ones (`adapter`)."""
    return config.rank > 0 or config.adapter is not None


def rank_of(config: LoraConfig) -> int:
    """Return the rank of the adapters: the existing one's, else `model.lora.rank` (0: none).

    Raises:
        ConfigError: `model.lora.adapter` has no adapter, or another rank than `model.lora.rank`.
    """
    if config.adapter is None:
        return config.rank
    settings = adapter_settings(config.adapter)
    if settings is None:
        raise ConfigError(f"model.lora.adapter={config.adapter!r}: there is no adapter_config.json in that folder")
    rank = int(settings.get("r", 0))
    if config.rank not in (0, rank):
        raise ConfigError(
            f"model.lora.rank={config.rank}, but the adapter {config.adapter!r} has rank {rank}; leave the rank out"
        )
    if full := settings.get("modules_to_save"):
        raise ConfigError(
            f"model.lora.adapter={config.adapter!r} has modules_to_save={full}, trained in full: only adapters are "
            "trained further here; merge it into its model (peft's merge_and_unload) and set model.path to that"
        )
    return rank


def apply_lora(model: PreTrainedModel, config: LoraConfig, *, moving_reference: bool = False) -> PeftModel:
    """Put trainable fp32 low-rank adapters on a model and freeze the rest.

    A new adapter starts as the identity: its random half comes from torch's generator, which the caller seeds. An
    existing one (`model.lora.adapter`) is loaded twice: to be trained, and frozen under the name "reference".

    Args:
        model: without adapters.
        config: the adapters.
        moving_reference: add a frozen copy of a new adapter, too.

    Raises:
        ConfigError: a target module does not exist, or text does not pass it; or the adapter cannot be read or does
            not fit.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft import PeftModel, get_peft_model

    from hwgrpo.models.adapted_experts import multiply_adapters

    if config.adapter is not None:
        wrapped = _load_adapter(model, config)
        multiply_adapters(wrapped)
        _skip_casts(wrapped)
        return wrapped
    assert config.rank > 0
    targets = list(config.target_modules)
    if targets != ALL_LINEAR:
        _check_targets(model, targets)
    adapted = adapted_layers(model, targets, config.vision)
    everywhere = {name for name, module in _linear_layers(model).items() if _is_named(name, targets)}
    # peft keeps short names where they are equivalent
    short = everywhere == adapted.keys() and not any(target.startswith(PATTERN) for target in targets)
    names = list(adapted) if not short else "all-linear" if targets == ALL_LINEAR else targets
    settings = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  (annotated int, used as a factor)
        lora_dropout=config.dropout,
        use_rslora=config.rslora,
        use_dora=config.dora,
        target_modules=names,
        task_type="CAUSAL_LM",
    )
    wrapped = get_peft_model(model, settings, adapter_name=TRAINED_ADAPTER)
    assert isinstance(wrapped, PeftModel)
    if moving_reference:
        _add_reference(wrapped)
    multiply_adapters(wrapped)
    _skip_casts(wrapped)
    return wrapped


def _skip_casts(model: nn.Module) -> None:
    """Make adapters read inputs of autocast's dtype as they are, of which peft would make fp32 copies.

    Autocast rounds those copies back for the product, so the bits are the same. DoRA reads its input elsewhere, too.
    """
    from peft.tuners.lora.layer import Linear

    for module in model.modules():
        if isinstance(module, Linear) and not module.lora_variant:
            module._cast_input_dtype = MethodType(_uncast, module)  # pyright: ignore[reportAttributeAccessIssue]


def _uncast(self: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype == torch.get_autocast_dtype(kind):
        return x
    return type(self)._cast_input_dtype(self, x, dtype)


def _add_reference(model: PeftModel) -> None:
    """Add a frozen copy of a new adapter; random numbers of the run are as without it."""
    settings = copy.deepcopy(model.peft_config[TRAINED_ADAPTER])
    settings.inference_mode = True
    with torch.random.fork_rng(devices=[]):
        model.add_adapter(REFERENCE_ADAPTER, settings)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, trained in trained_adapter(model):
            parameters[reference_name(name)].copy_(trained)


@torch.no_grad()
def initialize_dora(model: nn.Module, config: LoraConfig) -> None:
    """Set the norms of new DoRA adapters to those of the weights; peft may have had no weights to read."""
    if config.adapter is not None or not config.dora:
        return
    for module in model.modules():
        norms: Any = getattr(module, "lora_magnitude_vector", {})
        for name in norms:
            layer: Any = module.base_layer  # type: ignore[attr-defined] - peft's layers have one
            norms[name].weight.copy_(layer.weight.float().norm(dim=0 if isinstance(layer, Conv1D) else 1))


def trained_adapter(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of the adapter that is trained."""
    for name, parameter in model.named_parameters():
        if TRAINED_ADAPTER in name.split("."):
            yield name, parameter


def reference_name(name: str) -> str:
    """Return the name of a parameter of the trained adapter in its frozen copy."""
    parts = name.split(".")
    parts[len(parts) - 1 - parts[::-1].index(TRAINED_ADAPTER)] = REFERENCE_ADAPTER
    return ".".join(parts)


def adapted_layers(model: PreTrainedModel, targets: list[str], vision: str = "none") -> dict[str, Any]:
    """Return the linear layers that get new adapters, by name: those of `targets` that text passes.

    Text passes the decoder; adapters of an audio tower would have no gradient.

    Args:
        model: without adapters.
        targets: `model.lora.target_modules`.
        vision: `model.lora.vision`, further parts of a vision-language model.
    """
    decoder = set(model.get_decoder().modules()) | vision_modules(model, vision)
    return {
        name: layer
        for name, layer in _linear_layers(model).items()
        if layer in decoder and _is_named(name, targets) and not (targets == ALL_LINEAR and _is_read_past(model, name))
    }


def _is_read_past(model: PreTrainedModel, name: str) -> bool:
    """Return whether kernels read a layer's weight past its adapter."""
    return name.rsplit(".", 1)[-1] == OUT_PROJ and model.config.model_type in READ_PAST_ADAPTERS


def _linear_layers(model: PreTrainedModel) -> dict[str, Any]:
    """Return all linear layers but the LM head, by name."""
    head = model.get_output_embeddings()
    kinds = (torch.nn.Linear, Conv1D)
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds) and m is not head}


def _is_named(name: str, targets: list[str]) -> bool:
    return targets == ALL_LINEAR or any(_is_target(name, target) for target in targets)


def _is_target(name: str, target: str) -> bool:
    if not target.startswith(PATTERN):
        return name == target or name.endswith(f".{target}")
    try:
        return re.fullmatch(target.removeprefix(PATTERN), name) is not None
    except re.error as error:
        raise ConfigError(f"model.lora.target_modules: {target!r} is no regular expression: {error}") from error


def _check_targets(model: PreTrainedModel, targets: list[str]) -> None:
    for target in targets:
        layers = adapted_layers(model, [target])
        if any(_is_read_past(model, name) for name in layers):
            raise ConfigError(
                f"model.lora.target_modules={targets}: {target!r} has {OUT_PROJ}, whose weight the kernels of "
                f"{model.config.model_type!r} read past an adapter; leave it out, or use all-linear, which does"
            )
        if layers:
            continue
        if _is_head(model, target):
            raise ConfigError(
                f"model.lora.target_modules={targets}: {target!r} is the LM head, which gets no adapter; leave it out"
            )
        short = sorted({name.rsplit(".", 1)[-1] for name in adapted_layers(model, ALL_LINEAR)})
        near = nearest(target, short)
        hint = f" Did you mean {near!r}?" if near else ""
        elsewhere = any(_is_named(name, [target]) for name in _linear_layers(model))
        what = f"text passes no linear layer {target!r}" if elsewhere else f"the model has no linear layer {target!r}"
        raise ConfigError(
            f"model.lora.target_modules={targets}: {what}; it has {', '.join(short)}; or all-linear.{hint}"
        )


def _is_head(model: PreTrainedModel, target: str) -> bool:
    """Return whether a target is the LM head."""
    head = model.get_output_embeddings()
    return any(module is head and _is_named(name, [target]) for name, module in model.named_modules())


def _load_adapter(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    from peft import PeftModel

    assert config.adapter is not None
    folder = Path(config.adapter).expanduser()
    rank_of(config)  # refuses a folder without an adapter and a rank that contradicts it
    targets = (adapter_settings(config.adapter) or {}).get("target_modules") or []
    # peft's own: a list of names, all-linear, or a regular expression
    named = [f"{PATTERN}{targets}"] if isinstance(targets, str) else targets
    if targets != "all-linear" and any(_is_head(model, target) for target in named):
        raise ConfigError(
            f"model.lora.adapter={config.adapter!r} adapts the LM head, which is not trained further here; merge it "
            "into its model (peft's merge_and_unload) and set model.path to that"
        )
    try:
        wrapped = PeftModel.from_pretrained(model, str(folder), adapter_name=TRAINED_ADAPTER, is_trainable=True)
        wrapped.load_adapter(str(folder), adapter_name=REFERENCE_ADAPTER, is_trainable=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"model.lora.adapter={config.adapter!r} cannot be put on this model ({type(model).__name__}): {error}"
        ) from error
    return wrapped


@contextmanager
def without_weights() -> Iterator[None]:
    """Put adapters on a model on the meta device without weights of their own."""
    with warnings.catch_warnings(), META, no_init_weights():
        # of an adapter that is read: its weights have no place here, which is the point
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
        yield
