"""Where DeepSpeed's ZeRO optimizers keep a rank's part of weights, gradients and moments.

Stages 1 and 2 lay all parameters of a group one behind the other and give each rank a run of that; a run may begin and
end within a parameter. Stage 3 gives each rank a run of every parameter, padded to one length. Both keep the fp32
masters of a rank in a few flat tensors, which the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """Where a rank keeps its run of a parameter."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """The first of its elements that is held."""
    flat: torch.Tensor
    """The flat fp32 masters."""
    first: int
    """Where in them the run begins."""
    count: int
    """Elements held."""


class Parts(Protocol):
    """A ZeRO optimizer, in terms that all stages share."""

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's gradients once an update's last backward is done: each element on one rank only."""
        ...

    def drop(self) -> None:
        """Forget all gradients, also those of a backward that did not come to its end."""
        ...

    def place(self, parameter: torch.Tensor) -> Place | None:
        """Return where this rank keeps its run of a trainable parameter; None: it holds nothing of it."""
        ...

    def masters_written(self) -> None:
        """Make the weights that passes use from the fp32 masters, on all ranks."""
        ...

    def whole(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a parameter whole, a trainable one in fp32; every rank asks for it."""
        ...


class Flattened:
    """Stages 1 and 2.

    Args:
        zero: DeepSpeed's optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    def gradients(self) -> list[torch.Tensor]:
        if self._zero.cpu_offload:
            return [flat.grad for flat in self._zero.single_partition_of_fp32_groups]
        return [each for group in self._zero.averaged_gradients.values() if group for each in group]

    def drop(self) -> None:
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        for kept in (zero.averaged_gradients, zero.all_grad_tensors):
            for group in kept:
                kept[group] = None
        zero.micro_step_id = -1
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.params_already_reduced = [False] * len(zero.params_already_reduced)
        zero._release_ipg_buffers()
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
            zero.accumulated_grads_in_cpu.clear()
            zero._offload_accumulated_param_ids.clear()
            for flat in zero.single_partition_of_fp32_groups:
                flat.grad.zero_()
        _end_backward(zero)

    def place(self, parameter: torch.Tensor) -> Place | None:
        fragment: Any = getattr(parameter, "_hp_mapping", None)
        if fragment is None:
            return None
        flat = self._zero.single_partition_of_fp32_groups[fragment.param_group_index]
        held, kept = fragment.lp_fragment_address, fragment.hp_fragment_address
        return Place(tuple(parameter.shape), held.start, flat, kept.start, kept.numel)

    def masters_written(self) -> None:
        self._zero.update_lp_params()

    def whole(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        yield parameter.detach()


class Cut:
    """Stage 3.

    Args:
        zero: DeepSpeed's optimizer.
        gathered: deepspeed.zero.GatheredParameters.
        rank: this process's.
        ranks: how many there are.
        device: where passes run.
    """

    def __init__(self, zero: Any, gathered: Any, rank: int, ranks: int, device: torch.device) -> None:
        self._zero, self._gathered, self._rank, self._ranks, self._device = zero, gathered, rank, ranks, device

    def gradients(self) -> list[torch.Tensor]:
        if self._zero.offload_optimizer:
            return [flat.grad for flat in self._zero.fp32_partitioned_groups_flat]
        return [each for group in self._zero.averaged_gradients.values() if group for each in group]

    def drop(self) -> None:
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        zero.averaged_gradients = {}
        # A parameter without a gradient in the next update's first backward would be added to, not overwritten.
        zero.grad_partitions_flat_buffer.zero_()
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()
        for each in zero.params_already_reduced:
            zero.params_already_reduced[each] = False
        if zero.offload_optimizer:
            zero.reset_cpu_buffers()
            for flat in zero.fp32_partitioned_groups_flat:
                flat.grad.zero_()
        _end_backward(zero)

    def place(self, parameter: Any) -> Place | None:
        group, first, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
        start = min(self._rank * size, parameter.ds_numel)
        count = min(size, parameter.ds_numel - start)
        return Place(tuple(parameter.ds_shape), start, self._zero.fp32_partitioned_groups_flat[group], first, count)

    def masters_written(self) -> None:
        zero = self._zero
        zero._partition_all_parameters()
        for group in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:  # small ones, kept whole on every rank
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def whole(self, parameter: Any) -> Iterator[torch.Tensor]:
        if not parameter.requires_grad:
            with self._gathered([parameter]):
                yield parameter.detach()
            return
        place = self.place(parameter)
        assert place is not None
        size = self._zero.grad_position[self._zero.get_param_id(parameter)][2]
        mine = place.flat.detach().narrow(0, place.first, size).to(self._device)
        runs = mine.new_empty(self._ranks, size)
        dist.all_gather(list(runs), mine)
        yield runs.view(-1)[: parameter.ds_numel].view(parameter.ds_shape)


def _end_backward(zero: Any) -> None:
    """Leave a backward that an error ended in its middle."""
    while zero._backward_active_depth:
        zero.exit_backward()
