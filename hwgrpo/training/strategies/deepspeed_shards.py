"""A rank's shards of weights, gradients and optimizer states in DeepSpeed's ZeRO optimizers.

Stages 1 and 2 concatenate all parameters of a group and give each rank a run of elements, which may begin and end
within a parameter. Stage 3 gives each rank a run of every parameter, padded to one length. Both keep a rank's fp32
masters in a few flat tensors, which the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ShardLocation:
    """Location of a rank's shard of a parameter in its flat masters."""

    shape: tuple[int, ...]
    """Shape of the full parameter."""
    start: int
    """First element of the parameter in the shard."""
    flat: torch.Tensor
    """The flat fp32 masters."""
    first: int
    """Index of the shard's first element in `flat`."""
    count: int
    """Elements in the shard."""


class ZeroShards(Protocol):
    """The interface to a ZeRO optimizer of any stage."""

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's gradients after an update's last backward: each element on one rank only."""
        ...

    def discard_gradients(self) -> None:
        """Discard all gradients, including those of an interrupted backward."""
        ...

    def locate(self, parameter: torch.Tensor) -> ShardLocation | None:
        """Return the location of this rank's shard of a trainable parameter; None if it has no element of it."""
        ...

    def refresh_parameters(self) -> None:
        """Copy the fp32 masters into the weights that passes use, on all ranks."""
        ...

    def gather_full(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the full parameter, a trainable one in fp32. A collective: every rank calls it."""
        ...


class Stage12Shards:
    """Shards of ZeRO stages 1 and 2.

    Args:
        zero: DeepSpeed's optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    def gradients(self) -> list[torch.Tensor]:
        if self._zero.cpu_offload:
            return [flat.grad for flat in self._zero.single_partition_of_fp32_groups]
        return [each for group in self._zero.averaged_gradients.values() if group for each in group]

    def discard_gradients(self) -> None:
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        for gradients in (zero.averaged_gradients, zero.all_grad_tensors):
            for group in gradients:
                gradients[group] = None
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

    def locate(self, parameter: torch.Tensor) -> ShardLocation | None:
        fragment: Any = getattr(parameter, "_hp_mapping", None)
        if fragment is None:
            return None
        flat = self._zero.single_partition_of_fp32_groups[fragment.param_group_index]
        in_parameter, in_flat = fragment.lp_fragment_address, fragment.hp_fragment_address
        return ShardLocation(tuple(parameter.shape), in_parameter.start, flat, in_flat.start, in_flat.numel)

    def refresh_parameters(self) -> None:
        self._zero.update_lp_params()

    def gather_full(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        yield parameter.detach()


class Stage3Shards:
    """Shards of ZeRO stage 3.

    Args:
        zero: DeepSpeed's optimizer.
        gathered: deepspeed.zero.GatheredParameters.
        rank: this process's rank.
        ranks: number of ranks.
        device: device of the passes.
    """

    def __init__(self, zero: Any, gathered: Any, rank: int, ranks: int, device: torch.device) -> None:
        self._zero, self._gathered, self._rank, self._ranks, self._device = zero, gathered, rank, ranks, device

    def gradients(self) -> list[torch.Tensor]:
        if self._zero.offload_optimizer:
            return [flat.grad for flat in self._zero.fp32_partitioned_groups_flat]
        return [each for group in self._zero.averaged_gradients.values() if group for each in group]

    def discard_gradients(self) -> None:
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        zero.averaged_gradients = {}
        # The next update would add to a parameter's entry here if its first backward gives that parameter no gradient.
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

    def locate(self, parameter: Any) -> ShardLocation | None:
        group, first, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
        start = min(self._rank * size, parameter.ds_numel)
        count = min(size, parameter.ds_numel - start)
        return ShardLocation(
            tuple(parameter.ds_shape), start, self._zero.fp32_partitioned_groups_flat[group], first, count
        )

    def refresh_parameters(self) -> None:
        zero = self._zero
        zero._partition_all_parameters()
        for group in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:  # small ones, unsharded on every rank
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def gather_full(self, parameter: Any) -> Iterator[torch.Tensor]:
        if not parameter.requires_grad:
            with self._gathered([parameter]):
                yield parameter.detach()
            return
        location = self.locate(parameter)
        assert location is not None
        size = self._zero.grad_position[self._zero.get_param_id(parameter)][2]
        mine = location.flat.detach().narrow(0, location.first, size).to(self._device)
        runs = mine.new_empty(self._ranks, size)
        dist.all_gather(list(runs), mine)
        yield runs.view(-1)[: parameter.ds_numel].view(parameter.ds_shape)


def _end_backward(zero: Any) -> None:
    """Exit a backward that an error interrupted."""
    while zero._backward_active_depth:
        zero.exit_backward()
