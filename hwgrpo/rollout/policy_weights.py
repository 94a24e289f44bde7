"""The policy's full weights for an engine with its own copy, whatever shards them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hwgrpo.models.lm_head import causal_lm
from hwgrpo.models.lora import TRAINED_ADAPTER, has_adapters
from hwgrpo.models.meta_device import full_shape
from hwgrpo.models.vision import is_vision_name

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter in the format of a peft checkpoint."""

    settings: Mapping[str, Any]
    """Content of adapter_config.json; JSON-able."""
    tensors: Mapping[str, torch.Tensor]
    """Content of adapter_model.safetensors, by peft's names."""


class PolicyWeights(Protocol):
    """The policy's current weights for an engine that has its own copy.

    All methods are collective: every rank calls them in the same order and exhausts the iterators, also a rank that
    does not use the tensors. A tensor may be the policy's own, or valid only until the next one is requested: copy it
    to keep it.
    """

    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every full (unsharded) weight of the base model under its name in a Hugging Face checkpoint.

        Names have no wrapper's prefix. Tied weights appear once; persistent buffers are included, adapters are not.
        """
        ...

    def trainable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full trainable parameters under their names in the model."""
        ...

    def adapter(self) -> AdapterWeights | None:
        """Return the full trained adapter, or None where all parameters are trained."""
        ...


class WithoutVision:
    """The weights of a vision-language model but those of its tower and projector; see `PolicyWeights`.

    Args:
        weights: of the whole model.
    """

    def __init__(self, weights: PolicyWeights) -> None:
        self._weights = weights
        self.trainable, self.adapter = weights.trainable, weights.adapter

    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight of the text model and its head."""
        yield from ((name, weight) for name, weight in self._weights.full() if not is_vision_name(name))


class ModuleWeights:
    """The weights of a model that is unsharded on every rank.

    Args:
        model: a transformers causal LM, or one wrapped by peft.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight of the base model under its name in a Hugging Face checkpoint."""
        base = causal_lm(self._model)
        state: Any = remove_tied_weights_from_state_dict(_without_adapters(base), base)
        yield from revert_weight_conversion(base, state).items()

    def trainable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the trainable parameters under their names in the model."""
        yield from ((name, p.detach()) for name, p in self._model.named_parameters() if p.requires_grad)

    @torch.no_grad()
    def adapter(self) -> AdapterWeights | None:
        """Return the adapter that is trained, or None."""
        if not has_adapters(self._model):
            return None
        from peft import get_peft_model_state_dict

        tensors = get_peft_model_state_dict(self._model, adapter_name=TRAINED_ADAPTER, save_embedding_layers=False)
        return AdapterWeights(adapter_settings(self._model), tensors)


class ShardedWeights:
    """The weights of a sharded model, gathered one parameter at a time.

    Args:
        model: a transformers causal LM, or one wrapped by peft, as a strategy has sharded it.
        gather: `Strategy.gather_full_parameters`: yields names and full parameters; with True only the trainable ones.
    """

    def __init__(self, model: Any, gather: Callable[[bool], Iterator[tuple[str, torch.Tensor]]]) -> None:
        self._model = model
        self._gather = gather
        self._converts_separately: bool | None = None

    @torch.no_grad()
    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight of the base model under its name in a Hugging Face checkpoint."""
        base = causal_lm(self._model)
        own = {parameter: name for name, parameter in self._model.named_parameters()}
        parameters = dict(base.named_parameters(remove_duplicate=False))
        in_place = {parameter: torch.empty(1) for parameter in own}  # ties are detected by shared memory
        untied = remove_tied_weights_from_state_dict({n: in_place[p] for n, p in parameters.items()}, base)
        clean = _names_without_adapters(base)
        names = {own[parameters[name]]: clean[name] for name in untied if name in clean}
        if self._converts_separately is None:
            self._converts_separately = _converts_separately(
                base, {names[own[p]]: full_shape(p) for p in own if own[p] in names}
            )
        joint: dict[str, torch.Tensor] = {}
        for name, weight in self._gather(False):
            if name in names and self._converts_separately:
                yield from revert_weight_conversion(base, {names[name]: weight}).items()
            elif name in names:
                joint[names[name]] = weight.to("cpu", copy=True)
        saved = base.state_dict().keys()
        joint |= {clean[name]: buffer for name, buffer in base.named_buffers() if name in saved}
        yield from revert_weight_conversion(base, joint).items()

    def trainable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the trainable parameters under their names in the model."""
        yield from self._gather(True)

    @torch.no_grad()
    def adapter(self) -> AdapterWeights | None:
        """Return the adapter that is trained, or None."""
        if not has_adapters(self._model):
            return None
        from peft import get_peft_model_state_dict

        trained = {name: weight.clone() for name, weight in self.trainable()}
        tensors = get_peft_model_state_dict(
            self._model, trained, adapter_name=TRAINED_ADAPTER, save_embedding_layers=False
        )
        return AdapterWeights(adapter_settings(self._model), tensors)


def _converts_separately(base: Any, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether each parameter converts to its checkpoint weights without the other parameters.

    Args:
        base: the model, with its conversion.
        shapes: shapes of its parameters.
    """
    meta_weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    expected = {name: weight.shape for name, weight in revert_weight_conversion(base, meta_weights).items()}
    converted = {}
    for pair in meta_weights.items():
        try:
            converted |= {name: weight.shape for name, weight in revert_weight_conversion(base, dict([pair])).items()}
        except (
            KeyError,
            IndexError,
            RuntimeError,
            TypeError,
            ValueError,
        ):  # a parameter that it is merged with is missing
            return False
    return converted == expected


@torch.no_grad()
def copy_weights(weights: Iterator[tuple[str, torch.Tensor]], model: nn.Module) -> None:
    """Copy weights into the parameters of a model, by name."""
    own = dict(model.named_parameters())
    for name, weight in weights:
        own[name].copy_(weight)


def adapter_settings(model: PeftModel) -> dict[str, Any]:
    """Return the adapter_config.json of the trained adapter; JSON-able."""
    settings = model.peft_config[TRAINED_ADAPTER].to_dict() | {"inference_mode": True}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}


def _without_adapters(base: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a model under its names without peft's layers."""
    clean = _names_without_adapters(base)
    return {clean[name]: tensor for name, tensor in base.state_dict().items() if name in clean}


def _names_without_adapters(base: nn.Module) -> dict[str, str]:
    """Return state-dict name -> name without peft's layers; adapters are left out."""
    adapted = tuple(f"{name}." for name, module in base.named_modules() if hasattr(module, "base_layer"))
    names = {}
    for name in base.state_dict():
        prefix = next((prefix for prefix in adapted if name.startswith(prefix)), None)
        if prefix is None:
            names[name] = name
        elif name.startswith(f"{prefix}base_layer."):
            names[name] = prefix + name.removeprefix(f"{prefix}base_layer.")
    return names
