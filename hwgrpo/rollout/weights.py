"""How an engine that keeps weights of its own gets the policy's, whatever shards them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hwgrpo.models.head import causal_lm
from hwgrpo.models.lora import TRAINED_ADAPTER


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter as its folder would hold it."""

    settings: Mapping[str, Any]
    """What adapter_config.json says; JSON-able."""
    tensors: Mapping[str, torch.Tensor]
    """What adapter_model.safetensors holds, by peft's names."""


class PolicyWeights(Protocol):
    """The policy's current weights for an engine that has its own copy.

    Both methods are collective: every rank calls them in the same order and runs `whole` through to its end, also a
    rank that has no use for the tensors. A tensor may be the policy's own, or live only until the next one is asked
    for: whoever keeps it copies it.
    """

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight of the base model, whole (not a shard), under its name in a Hugging Face checkpoint.

        Names carry no wrapper's prefix. Tied weights come once, buffers that checkpoints hold are among them, adapters
        are not.
        """
        ...

    def adapter(self) -> AdapterWeights | None:
        """Return the adapter that is trained, whole, or None where all parameters are trained."""
        ...


class ModuleWeights:
    """The weights of a model that is whole on every rank: one process, or several that each hold all of it.

    Args:
        model: a transformers causal LM, or one wrapped by peft.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight of the base model under its name in a Hugging Face checkpoint."""
        base = causal_lm(self._model)
        state: Any = remove_tied_weights_from_state_dict(_without_adapters(base), base)
        yield from revert_weight_conversion(base, state).items()

    @torch.no_grad()
    def adapter(self) -> AdapterWeights | None:
        """Return the adapter that is trained, or None."""
        if not isinstance(self._model, PeftModel):
            return None
        tensors = get_peft_model_state_dict(self._model, adapter_name=TRAINED_ADAPTER, save_embedding_layers=False)
        return AdapterWeights(adapter_settings(self._model), tensors)


class ReplicaWeights(ModuleWeights):
    """The weights of a policy that is in shards, collected in a whole copy of its model.

    Args:
        replica: the copy, as the policy was before it was cut.
        trainable: yields the policy's trainable weights whole, by their names in the model.
    """

    def __init__(self, replica: Any, trainable: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        super().__init__(replica)
        self._trainable = trainable

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight of the base model under its name in a Hugging Face checkpoint."""
        take_over(self._trainable(), self._model)
        yield from super().whole()

    def adapter(self) -> AdapterWeights | None:
        """Return the adapter that is trained, or None."""
        if isinstance(self._model, PeftModel):
            take_over(self._trainable(), self._model)
        return super().adapter()


@torch.no_grad()
def take_over(weights: Iterator[tuple[str, torch.Tensor]], model: nn.Module) -> None:
    """Write weights into the parameters of a model that have their names."""
    own = dict(model.named_parameters())
    for name, weight in weights:
        own[name].copy_(weight)


def adapter_settings(model: PeftModel) -> dict[str, Any]:
    """Return what adapter_config.json says of the trained adapter; JSON-able."""
    settings = model.peft_config[TRAINED_ADAPTER].to_dict() | {"inference_mode": True}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}


def _without_adapters(base: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's state under the names it has without peft's layers."""
    adapted = tuple(f"{name}." for name, module in base.named_modules() if isinstance(module, BaseTunerLayer))
    state = {}
    for name, tensor in base.state_dict().items():
        prefix = next((prefix for prefix in adapted if name.startswith(prefix)), None)
        if prefix is None:
            state[name] = tensor
        elif name.startswith(f"{prefix}base_layer."):
            state[prefix + name.removeprefix(f"{prefix}base_layer.")] = tensor
    return state
