"""Outputs that a fused module may write in the compute dtype: those that autocast would round to it next anyway.

With fp32 master weights the residual stream is fp32, and under autocast every product casts its operands. `Readers`
watches a model's forward and records which functions read an output. If all of them cast it, the fused module writes
the compute dtype at once: the same bits, without the casts.

The gradients of those casts are added in fp32. So a norm hands out one copy per linear layer that reads it, and each of
these takes its own: the norm's backward gets their gradients separately, and adds them in fp32 too.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .fused_forwards import mark

COPIES = "copies_for_readers"
"""Attribute of a norm's output: the copies that no reader has taken yet."""

PRODUCTS = {torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention, torch.matmul, torch.bmm}
PRODUCTS |= {Tensor.matmul, Tensor.__matmul__, Tensor.bmm}
"""Functions whose operands autocast casts."""

MOVES = {Tensor.transpose, Tensor.reshape, Tensor.view, Tensor.contiguous, Tensor.expand, Tensor.__getitem__}
MOVES |= {Tensor.flatten, Tensor.unflatten, Tensor.permute, Tensor.clone, torch.repeat_interleave}
"""Functions that move elements and change none."""


class Readers(TorchFunctionMode):
    """Watch which functions read the watched tensors, and what is moved from them.

    Args:
        model: the model that runs.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        modules = dict(model.named_modules())
        self._layers = {
            name: each
            for name, each in modules.items()
            if type(each) is nn.Linear
            and "forward" not in vars(each)
            and not _is_cast_by_adapter(modules[name.rpartition(".")[0]])
        }
        self._names: dict[int, str] = {}
        self._alive: list[Tensor] = []
        self._outputs: dict[str, set[torch.dtype]] = {}
        self._linears: dict[str, list[str]] = {}
        self._direct: dict[str, bool] = {}
        self._others: set[str] = set()

    def watch(self, name: str, outputs: Iterable[Tensor]) -> None:
        """Watch a module's outputs; several calls of a module are all watched."""
        for each in outputs:
            self._outputs.setdefault(name, set()).add(each.dtype)
            self._follow(name, each)

    def _follow(self, name: str, tensor: Tensor) -> None:
        self._names[id(tensor)] = name
        self._alive.append(tensor)  # else another could have its id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for name in {self._names[id(each)] for each in _tensors((args, kwargs)) if id(each) in self._names}:
            if not any(True for _ in _tensors(result)):
                continue  # a shape, a dtype
            if func in MOVES and isinstance(result, Tensor):
                self._direct[name] = False
                self._follow(name, result)
            elif func is torch.nn.functional.linear:
                self._linears.setdefault(name, []).append(self._layer_of(args[1]))
            elif func in PRODUCTS:
                self._direct[name] = False
            else:
                self._others.add(name)
        return result

    def casts_all(self, name: str) -> bool:
        """Return whether a module's fp32 outputs are read, and autocast casts them for every reader."""
        return self._outputs.get(name) == {torch.float32} and name not in self._others

    def linears(self, name: str) -> tuple[str, ...] | None:
        """Return the linear layers that read a module's output, in order, if nothing else does and each once."""
        found = tuple(self._linears.get(name, ()))
        if not found or not self.casts_all(name) or not self._direct.get(name, True):
            return None
        return found if all(found) and len(set(found)) == len(found) else None

    def _layer_of(self, weight: Tensor) -> str:
        """Return the name of the layer that has a weight now; a loaned one has another afterwards."""
        return next((name for name, each in self._layers.items() if each.weight is weight), "")


def _is_cast_by_adapter(parent: Any) -> bool:
    """Return whether a layer's parent is an adapter of peft that casts what it reads to its own dtype.

    hwgrpo's adapters have a method of their own in place of that cast.
    """
    return hasattr(parent, "base_layer") and "_cast_input_dtype" not in vars(parent)


def _tensors(values: Any) -> Iterable[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for each in values.values():
            yield from _tensors(each)
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _tensors(each)


def autocast_dtype(like: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on a tensor's device, or None where it is off."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def hand_out(output: Tensor, copies: list[Tensor]) -> None:
    """Leave copies of a norm's output for the linear layers that read it; the last has the output itself."""
    if copies:
        setattr(output, COPIES, copies)


def linear_forward(self: Any, input: Tensor) -> Tensor:
    """Compute `nn.Linear`, of its own copy of a norm's output if there is one."""
    copies = getattr(input, COPIES, None)
    return nn.functional.linear(copies.pop() if copies else input, self.weight, self.bias)


mark(linear_forward, "rms_norm")  # type: ignore[arg-type]


def rounded(plain: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Return a function whose results are rounded to a dtype, as their readers would."""

    def cast(*args: Any) -> Any:
        result = plain(*args)
        return result.to(dtype) if isinstance(result, Tensor) else tuple(each.to(dtype) for each in result)

    return cast
