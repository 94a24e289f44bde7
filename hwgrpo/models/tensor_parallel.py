"""Tensor parallelism of decoder layers by transformers' own plan, with sequence parallelism between blocks.

Between blocks (attention or MLP) each of T ranks has 1/T of the tokens. A block all-gathers the tokens, computes with
1/T of the heads or intermediate units, and reduce-scatters its output, so that each rank keeps its own tokens
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2). Gradients of
weights that are not sharded are then partial: their sum over the ranks is the gradient.

torch's `parallelize_module` is not used: its `PrepareModuleInput` accepts no tuple, as `position_embeddings` is, and
gathers fp32 before autocast casts; checkpoints and weight transfer would also have to handle its DTensors.
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
"""Styles of the plan: a rank computes a shard of a linear layer's outputs; or receives a shard of its inputs."""
KNOWN = (COLUMNS, ROWS, "replicated_with_grad_allreduce")


@dataclass(frozen=True)
class ShardSpec:
    """How a parameter is sharded over the ranks, in equal parts."""

    dim: int
    shape: tuple[int, ...]
    """Full shape of the parameter."""


def reason_against_plan(plan: Mapping[str, str] | None, layers: str = "layers.*.") -> str | None:
    """Return why a plan is unsupported, or None.

    Args:
        plan: pattern of module names -> style; transformers' `base_model_tp_plan` or `tp_plan`.
        layers: substring of the patterns for decoder layers; others are ignored, since each rank computes embeddings
            and head for its own tokens.
    """
    styles = {style for pattern, style in (plan or {}).items() if layers in pattern}
    if not styles:
        return "transformers has no tensor-parallel plan for it"
    unknown = sorted(styles - set(KNOWN))
    if unknown:
        return f"its tensor-parallel plan has {', '.join(unknown)}; supported are {', '.join(KNOWN)}"
    return None


def tensor_parallel_error(size: int, reason: str, use: str = "1") -> ConfigError:
    """Return the error for layers that cannot be sharded over `size` ranks."""
    return ConfigError(
        f"trainer.tensor_parallel_size={size}: {reason}; use trainer.tensor_parallel_size={use}, or "
        "trainer.sequence_parallel_size"
    )


def shard_dims(base: Any) -> dict[str, int]:
    """Return parameter name -> sharded dimension by a model's plan; empty without a plan."""
    dims = {}
    for module, (name, style) in _styles(base).items():
        if style in (COLUMNS, ROWS) and isinstance(module, nn.Linear):
            dims[f"{name}.weight"] = 0 if style == COLUMNS else 1
            if style == COLUMNS and module.bias is not None:
                dims[f"{name}.bias"] = 0
    return dims


def _styles(base: Any) -> dict[nn.Module, tuple[str, str]]:
    """Return the modules of a model's plan, each with its name and style."""
    plan = getattr(base, "tp_plan", None) or {}
    patterns = {re.escape(name).replace(r"\*", r"[^.]+"): style for name, style in plan.items()}
    return {
        module: (name, style)
        for name, module in base.named_modules()
        for pattern, style in patterns.items()
        if re.fullmatch(pattern, name)
    }


class TensorParallel:
    """Shards the decoder layers of a model.

    Args:
        base: a transformers causal LM, possibly on the meta device.
        size: ranks of the group.
        rank: of this process in the group.
        group: the process group for device tensors.

    Raises:
        ConfigError: the model has no plan, or an unsupported one.
    """

    def __init__(self, base: Any, size: int, rank: int, group: Any) -> None:
        reason = reason_against_plan(base.tp_plan)
        if reason is not None:
            raise tensor_parallel_error(size, f"{type(base).__name__}: {reason}")
        self._styles = _styles(base)
        self._parents = {child: parent for parent in base.modules() for child in parent.children()}
        self._size, self._rank = size, rank
        self._tokens = _TokenHooks(size, group)
        self.shards: dict[str, ShardSpec] = {}
        """The sharded parameters, by name in the model."""

    def shard(self, layer: nn.Module) -> None:
        """Replace the full weights of a decoder layer by this rank's shards.

        Raises:
            ConfigError: a module cannot be sharded according to the plan.
        """
        blocks: dict[nn.Module, set[str]] = {}
        for module in layer.modules():
            name, style = self._styles.get(module, ("", ""))
            if style in (COLUMNS, ROWS):
                self._shard_linear(name, module, dim=0 if style == COLUMNS else 1)
                blocks.setdefault(self._parents[module], set()).add(style)
        for block, styles in blocks.items():
            if styles != {COLUMNS, ROWS} or any(other in blocks for other in list(block.modules())[1:]):
                raise tensor_parallel_error(
                    self._size, f"its tensor-parallel plan makes no block of a {type(block).__name__}"
                )
            self._tokens.register_hooks(block)

    def _shard_linear(self, name: str, module: nn.Module, dim: int) -> None:
        if not isinstance(module, nn.Linear):
            raise tensor_parallel_error(self._size, f"{name} is a {type(module).__name__}, not a linear layer")
        if module.weight.shape[dim] % self._size:
            raise tensor_parallel_error(
                self._size, f"it does not divide the {module.weight.shape[dim]} of {name}'s weight"
            )
        self._keep_shard(name, module, "weight", dim)
        if dim == 0:
            module.out_features //= self._size
        else:
            module.in_features //= self._size
        if module.bias is not None:
            if dim == 0:
                self._keep_shard(name, module, "bias", 0)
            else:  # each rank adds its share to the partial sum
                module.forward = lambda input: F.linear(input, module.weight, module.bias / self._size)

    def _keep_shard(self, name: str, module: nn.Module, attribute: str, dim: int) -> None:
        full: nn.Parameter = getattr(module, attribute)
        self.shards[f"{name}.{attribute}"] = ShardSpec(dim, tuple(full.shape))
        shard = full.detach().chunk(self._size, dim)[self._rank]
        # a copy: a view would keep the full parameter in memory
        module.register_parameter(attribute, nn.Parameter(shard.clone(memory_format=torch.contiguous_format)))
        getattr(module, attribute).requires_grad_(full.requires_grad)


class _TokenHooks:
    """All-gathers tokens before blocks, and reduce-scatters their outputs."""

    def __init__(self, size: int, group: Any) -> None:
        self._size, self._group = size, group
        self._positions: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=8)
        """Positions and rotary embeddings of this rank's tokens (the same in all layers), and of all tokens."""

    def register_hooks(self, block: nn.Module) -> None:
        block.register_forward_pre_hook(self._begin, with_kwargs=True)
        block.register_forward_hook(self._end)

    def _begin(self, block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        options = dict(options)
        if args:
            args = (self._gather(args[0]), *args[1:])
        else:
            options["hidden_states"] = self._gather(options["hidden_states"])
        positions = options.get("position_embeddings")
        if positions is not None:
            options["position_embeddings"] = tuple(self._gather_positions(each) for each in positions)
        if options.get("position_ids") is not None:  # some models scale queries by them
            options["position_ids"] = self._gather_positions(options["position_ids"])
        return args, options

    def _end(self, block: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return reduce_scatter_tokens(output, self._size, self._group)
        return reduce_scatter_tokens(output[0], self._size, self._group), *output[1:]

    def _gather(self, hidden: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(hidden.device.type):  # send the linear layers' dtype, not fp32
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        return all_gather_tokens(hidden, self._size, self._group)

    def _gather_positions(self, values: torch.Tensor) -> torch.Tensor:
        for own, gathered in self._positions:
            if own is values:
                return gathered
        self._positions.append((values, _all_gather(values.detach(), self._size, self._group)))
        return self._positions[-1][1]


def all_gather_tokens(tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    """All-gather tokens: [B, L, ...] from each rank's [B, L / size, ...], in rank order."""
    return _AllGatherTokens.apply(tensor, size, group)  # type: ignore[return-value]


def reduce_scatter_tokens(tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    """Reduce-scatter tokens: [B, L / size, ...], the sum over ranks of each rank's [B, L, ...]."""
    return _ReduceScatterTokens.apply(tensor, size, group)  # type: ignore[return-value]


class _AllGatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
        ctx.back = size, group
        return _all_gather(tensor, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter_tokens(gradients[0], *ctx.back), None, None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
        ctx.back = size, group
        return _reduce_scatter(tensor, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather_tokens(gradients[0], *ctx.back), None, None


def _all_gather(tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    parts = tensor.new_empty(size, *tensor.shape)
    dist.all_gather_into_tensor(parts.view(-1), tensor.contiguous().view(-1), group=group)
    return parts.transpose(0, 1).flatten(1, 2)


def _reduce_scatter(tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    parts = tensor.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    own = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(own.view(-1), parts.view(-1), group=group)
    return own
