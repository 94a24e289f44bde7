"""A rank's shard of the policy's state, the same for all strategies: runs of a parameter's elements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from hwgrpo.training.strategies import pinned_memory
from hwgrpo.training.strategies.held_adamw import STATES, HeldAdamW
from hwgrpo.training.strategies.muon import MOMENTUM, MuonAdamW

ADAMW_STATES = tuple(STATES)
"""AdamW's states of every element."""
STATE_NAMES = (*ADAMW_STATES, MOMENTUM)
"""States of every element that some optimizer has."""


@dataclass(frozen=True)
class ParamShard:
    """One rank's run of a trainable parameter's elements, with their AdamW states.

    Elements are counted in row-major order. The tensors are the live ones, views of them, or what an optimizer expands
    its states to: writing into them changes the values of the next step.
    """

    name: str
    """The parameter's name in the model that the policy wraps."""
    shape: tuple[int, ...]
    """Shape of the full parameter."""
    start: int
    """First element of the shard."""
    values: dict[str, torch.Tensor]
    """`parameter`, and with an optimizer its states, `exp_avg` and `exp_avg_sq` of AdamW: [count] each."""
    step: torch.Tensor | None = None
    """Updates of the parameter so far, AdamW's own counter: one number."""
    in_8_bits: bool = False
    """Its states are held in 8 bits; those in `values` are copies, or become what is held by `refresh_from_shards`."""

    @property
    def count(self) -> int:
        """Number of elements in the shard; 0 where other ranks hold all of them."""
        return self.values["parameter"].numel()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements [count] in row-major order, as a view of it."""
    assert tensor.is_contiguous(), "a view in row-major order needs a contiguous tensor"
    return tensor.detach().view(-1)


def full_param_shards(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    names: Collection[str] | None = None,
    *,
    read_only: bool = False,
) -> list[ParamShard]:
    """Return one shard per trainable parameter of an unsharded module.

    Args:
        module: has the full parameters.
        optimizer: AdamW over them, whose states become part of the shards.
        names: return these only; None: all.
        read_only: the caller does not write into them.
    """
    shards = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and (names is None or name in names):
            state = adamw_state(optimizer, parameter, read_only=read_only) if optimizer else {}
            values = {"parameter": flat(parameter)} | {key: flat(state[key]) for key in STATE_NAMES if key in state}
            coded = has_8_bit_states(optimizer, parameter)
            shards.append(ParamShard(name, tuple(parameter.shape), 0, values, state.get("step"), coded))
    return shards


def frozen_param_shards(module: nn.Module, names: Collection[str]) -> list[ParamShard]:
    """Return one shard of each of an unsharded module's frozen parameters with these names."""
    return [
        ParamShard(name, tuple(parameter.shape), 0, {"parameter": flat(parameter)})
        for name, parameter in module.named_parameters()
        if name in names
    ]


def copy_to_host(shards: Sequence[ParamShard]) -> list[ParamShard]:
    """Return read-only shards with copies in host memory, complete after the device's next synchronization."""
    live = [
        (index, key)
        for index, shard in enumerate(shards)
        for key in shard.values
        if key == "parameter" or not shard.in_8_bits
    ]
    copied: list[dict[str, torch.Tensor]] = [{} for _ in shards]
    copies = pinned_memory.copies([shards[index].values[key] for index, key in live])
    for (index, key), copy in zip(live, copies, strict=True):
        copied[index][key] = copy
    return [replace(shard, values=shard.values | own) for shard, own in zip(shards, copied, strict=True)]


def has_8_bit_states(optimizer: torch.optim.Optimizer | None, parameter: torch.Tensor) -> bool:
    """Return whether a parameter's optimizer states are held in 8 bits."""
    return isinstance(optimizer, HeldAdamW) and optimizer.in_8_bits(parameter)


def refresh_states(optimizer: torch.optim.Optimizer) -> None:
    """Hold the states that were written into shards, where an optimizer has them in another form."""
    if isinstance(optimizer, HeldAdamW):
        optimizer.refresh()


def adamw_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, *, read_only: bool = False
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state of a parameter, initialized as before the first update if it has none yet."""
    if isinstance(optimizer, HeldAdamW):
        return optimizer.read(parameter) if read_only else optimizer.expanded(parameter)
    state = optimizer.state[parameter]
    if isinstance(optimizer, MuonAdamW) and optimizer.has_momentum(parameter):
        state.setdefault(MOMENTUM, torch.zeros_like(parameter, memory_format=torch.preserve_format))
    elif not state:
        # AdamW's implementations expect the counter on the device when fused, on the CPU otherwise
        device = parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for key in ADAMW_STATES:
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state


def partition_shards(shards: Sequence[ParamShard], ranks: int) -> list[list[ParamShard]]:
    """Assign shards that every rank holds to the ranks, about equally many elements to each.

    Args:
        shards: in the same order on every rank.
        ranks: number of ranks.

    Returns:
        The shards of each rank.
    """
    shares: list[list[ParamShard]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for shard in sorted(shards, key=lambda shard: -shard.count):  # stable, so that all ranks agree
        least = sizes.index(min(sizes))
        shares[least].append(shard)
        sizes[least] += shard.count
    return shares
