"""Blocks of a model that ranks compute together, each with a part of their weights, after transformers' own plan.

Between blocks (attention, or the feed-forward part of a layer) each of T ranks has 1/T of the tokens. A block begins by
gathering the tokens of all, computes with 1/T of the heads or of the intermediate units, and ends with sums over ranks,
of which each keeps those of its own tokens (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 4.2.2). What gradients of other weights lack is then with the other ranks: their sum.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from hwgrpo.errors import ConfigError

COLUMNS, ROWS = "colwise", "rowwise"
"""Words of the plan: a rank computes a part of a linear layer's outputs; or gets a part of its inputs."""
KNOWN = (COLUMNS, ROWS, "replicated_with_grad_allreduce")


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut over the ranks, in equal parts."""

    dim: int
    shape: tuple[int, ...]
    """Of the whole parameter."""


def obstacle_in(plan: Mapping[str, str] | None, layers: str = "layers.*.") -> str | None:
    """Return why a plan cannot be followed, or None.

    Args:
        plan: pattern of module names -> word; transformers' `base_model_tp_plan` or `tp_plan`.
        layers: what patterns of modules in decoder layers have in them; others are not followed, for head and
            embeddings are shared out by tokens.
    """
    words = {word for pattern, word in (plan or {}).items() if layers in pattern}
    if not words:
        return "transformers has no tensor-parallel plan for it"
    unknown = sorted(words - set(KNOWN))
    if unknown:
        return f"its tensor-parallel plan has {', '.join(unknown)}; known are {', '.join(KNOWN)}"
    return None


def not_cut(size: int, why: str, use: str = "1") -> ConfigError:
    """Return the error for layers that cannot be cut over `size` ranks."""
    return ConfigError(
        f"trainer.tensor_parallel_size={size}: {why}; use trainer.tensor_parallel_size={use}, or "
        "trainer.sequence_parallel_size"
    )


def tensor_dims(base: Any) -> dict[str, int]:
    """Return the dimension that each parameter of a model's plan is cut along, by name; none without a plan."""
    dims = {}
    for module, (name, word) in _words(base).items():
        if word in (COLUMNS, ROWS) and isinstance(module, nn.Linear):
            dims[f"{name}.weight"] = 0 if word == COLUMNS else 1
            if word == COLUMNS and module.bias is not None:
                dims[f"{name}.bias"] = 0
    return dims


def _words(base: Any) -> dict[nn.Module, tuple[str, str]]:
    """Return the modules that a model's plan names, each with its name and its word."""
    plan = getattr(base, "tp_plan", None) or {}
    patterns = {re.escape(name).replace(r"\*", r"[^.]+"): word for name, word in plan.items()}
    return {
        module: (name, word)
        for name, module in base.named_modules()
        for pattern, word in patterns.items()
        if re.fullmatch(pattern, name)
    }


class TensorParallel:
    """Cuts the decoder layers of a model.

    Args:
        base: a transformers causal LM; its weights may be missing still.
        size: ranks of the group.
        rank: this one's place among them.
        group: the process group that tensors of the device travel in.

    Raises:
        ConfigError: the model has no plan, or one that cannot be followed.
    """

    def __init__(self, base: Any, size: int, rank: int, group: Any) -> None:
        obstacle = obstacle_in(base.tp_plan)
        if obstacle is not None:
            raise not_cut(size, f"{type(base).__name__}: {obstacle}")
        self._words = _words(base)
        self._parents = {child: parent for parent in base.modules() for child in parent.children()}
        self._size, self._rank = size, rank
        self._tokens = _Tokens(size, group)
        self.cuts: dict[str, Cut] = {}
        """What has been cut, by the parameter's name in the model."""

    def cut(self, layer: nn.Module) -> None:
        """Keep this rank's part of a decoder layer's weights, which are there whole.

        Raises:
            ConfigError: something in it cannot be cut as the plan says.
        """
        blocks: dict[nn.Module, set[str]] = {}
        for module in layer.modules():
            name, word = self._words.get(module, ("", ""))
            if word in (COLUMNS, ROWS):
                self._cut_linear(name, module, dim=0 if word == COLUMNS else 1)
                blocks.setdefault(self._parents[module], set()).add(word)
        for block, words in blocks.items():
            if words != {COLUMNS, ROWS} or any(other in blocks for other in list(block.modules())[1:]):
                raise not_cut(self._size, f"its tensor-parallel plan makes no block of a {type(block).__name__}")
            self._tokens.surround(block)

    def _cut_linear(self, name: str, module: nn.Module, dim: int) -> None:
        if not isinstance(module, nn.Linear):
            raise not_cut(self._size, f"{name} is a {type(module).__name__}, and no linear layer to be cut")
        if module.weight.shape[dim] % self._size:
            raise not_cut(self._size, f"it does not divide the {module.weight.shape[dim]} of {name}'s weight")
        self._keep_part(name, module, "weight", dim)
        if dim == 0:
            module.out_features //= self._size
        else:
            module.in_features //= self._size
        if module.bias is not None:
            if dim == 0:
                self._keep_part(name, module, "bias", 0)
            else:  # a part of each rank's partial sum
                module.forward = lambda input: F.linear(input, module.weight, module.bias / self._size)

    def _keep_part(self, name: str, module: nn.Module, attribute: str, dim: int) -> None:
        whole: nn.Parameter = getattr(module, attribute)
        self.cuts[f"{name}.{attribute}"] = Cut(dim, tuple(whole.shape))
        part = whole.detach().chunk(self._size, dim)[self._rank]
        # a copy: a view would keep all of it
        module.register_parameter(attribute, nn.Parameter(part.clone(memory_format=torch.contiguous_format)))
        getattr(module, attribute).requires_grad_(whole.requires_grad)


class _Tokens:
    """Gathers tokens where blocks begin, and leaves each rank its own where they end."""

    def __init__(self, size: int, group: Any) -> None:
        self._size, self._group = size, group
        self._positions: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=8)
        """Positions and rotary embeddings of this rank's tokens, the same tensors for all layers, and those of all."""

    def surround(self, block: nn.Module) -> None:
        block.register_forward_pre_hook(self._begin, with_kwargs=True)
        block.register_forward_hook(self._end)

    def _begin(self, block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        options = dict(options)
        if args:
            args = (self._all(args[0]), *args[1:])
        else:
            options["hidden_states"] = self._all(options["hidden_states"])
        positions = options.get("position_embeddings")
        if positions is not None:
            options["position_embeddings"] = tuple(self._all_positions(each) for each in positions)
        if options.get("position_ids") is not None:  # some scale queries by them
            options["position_ids"] = self._all_positions(options["position_ids"])
        return args, options

    def _end(self, block: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return own_tokens(output, self._size, self._group)
        return own_tokens(output[0], self._size, self._group), *output[1:]

    def _all(self, hidden: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(hidden.device.type):  # so that no more is sent than linear layers will read
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        return all_tokens(hidden, self._size, self._group)

    def _all_positions(self, values: torch.Tensor) -> torch.Tensor:
        for own, gathered in self._positions:
            if own is values:
                return gathered
        self._positions.append((values, _gathered(values.detach(), self._size, self._group)))
        return self._positions[-1][1]


def all_tokens(tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    """Return [B, L, ...]: the tokens of all ranks in their order, of each rank's [B, L / size, ...]."""
    return _AllTokens.apply(tensor, size, group)  # type: ignore[return-value]


def own_tokens(tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    """Return [B, L / size, ...]: the sum over ranks of this rank's tokens, of each rank's [B, L, ...]."""
    return _OwnTokens.apply(tensor, size, group)  # type: ignore[return-value]


class _AllTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
        ctx.back = size, group
        return _gathered(tensor, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return own_tokens(gradients[0], *ctx.back), None, None


class _OwnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
        ctx.back = size, group
        return _summed(tensor, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_tokens(gradients[0], *ctx.back), None, None


def _gathered(tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    parts = tensor.new_empty(size, *tensor.shape)
    dist.all_gather_into_tensor(parts.view(-1), tensor.contiguous().view(-1), group=group)
    return parts.transpose(0, 1).flatten(1, 2)


def _summed(tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    parts = tensor.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    own = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(own.view(-1), parts.view(-1), group=group)
    return own
