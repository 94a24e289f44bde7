"""A rank's shards of parameters under tensor parallelism (`trainer.tensor_parallel_size`)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hwgrpo.models.tensor_parallel import ShardSpec, TensorParallel
from hwgrpo.models.ulysses_attention import all_to_all
from hwgrpo.training.policy.sequence_shard import SequenceGroup
from hwgrpo.training.strategies.param_shard import ParamShard, flat


class TensorParallelShard:
    """A rank's share of each parameter in its tensor-parallel group; a single rank has all of it.

    Args:
        group: the ranks that layers are sharded over.
    """

    def __init__(self, group: SequenceGroup) -> None:
        self._group = group
        self.size = group.size
        self.shard_specs: Mapping[str, ShardSpec] = {}
        """Name -> shard of the sharded parameters; the others are replicated in the group."""
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def mesh(self, device_type: str, ranks: int, timeout: float) -> DeviceMesh:
        """Return the mesh of ranks that have the same tensor-parallel shard as this one.

        Args:
            device_type: torch's device type.
            ranks: number of ranks of the run.
            timeout: seconds that they wait for each other.
        """
        if self.size == 1:
            return init_device_mesh(device_type, (ranks,))
        mesh = init_device_mesh(device_type, (ranks // self.size, self.size), mesh_dim_names=("same", "group"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch sets the timeout of two libraries; others keep their own
            for group in mesh.get_all_groups():
                c10d._set_pg_timeout(timedelta(seconds=timeout), group)
        return mesh["same"]

    def layer_sharder(self, base: Any) -> TensorParallel | None:
        """Return the object that shards the decoder layers of a transformers model; None for a single rank.

        Raises:
            ConfigError: transformers has no tensor-parallel plan for it, or an unsupported one.
        """
        if self.size == 1:
            return None
        return TensorParallel(base, self.size, self._group.rank, self._group.device_group)

    def owns(self, name: str) -> bool:
        """Return whether this rank's shard of a parameter is not a copy of another rank's in the group."""
        return self._group.rank == 0 or name in self.shard_specs

    def reduce_gradients(self, gradients: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Turn gradients averaged over groups into averages over all ranks, once per update.

        A sharded parameter's gradient comes from all tokens of the group, a replicated one's from this rank's tokens.
        """
        if self.size == 1:
            return
        replicated = [gradient for name, gradient in gradients if name not in self.shard_specs]
        if replicated:
            bucket = torch.cat([gradient.flatten() for gradient in replicated])
            dist.all_reduce(bucket, group=self._process_group(bucket))
            for gradient, total in zip(replicated, bucket.split([g.numel() for g in replicated]), strict=True):
                gradient.copy_(total.view_as(gradient))
        for _, gradient in gradients:
            gradient.div_(self.size)

    def param_shard(
        self,
        name: str,
        shape: tuple[int, ...],
        start: int,
        values: Mapping[str, torch.Tensor],
        step: torch.Tensor | None,
    ) -> ParamShard:
        """Return the shard of a parameter; every rank of the group calls this in the same order.

        Args:
            name: name of the parameter.
            shape: shape of this rank's tensor-parallel shard, before its strategy shards it further.
            start: first element of `values` in that shard.
            values: state name -> live rows. If columns are sharded, the returned shard has copies of as many elements
                instead, which `write_back_copies` writes back.
            step: the optimizer's step counter; None without one.
        """
        spec = self.shard_specs.get(name)
        if spec is None:
            return ParamShard(name, shape, start, {key: flat(value) for key, value in values.items()}, step)
        if spec.dim == 0:
            start += self._group.rank * _elements(shape)
            return ParamShard(name, spec.shape, start, {key: flat(value) for key, value in values.items()}, step)
        first = start // shape[1] + sum(self._rows_per_rank(values["parameter"])[: self._group.rank])
        copies = {key: self._rows(value) for key, value in values.items()}
        self._copies += [(copies[key], value.detach()) for key, value in values.items()]
        return ParamShard(
            name, spec.shape, first * spec.shape[1], {key: flat(value) for key, value in copies.items()}, step
        )

    def drop_copies(self) -> None:
        """Drop the copies in shards: no caller will write into them."""
        self._copies = []

    def write_back_copies(self) -> None:
        """Copy values written into the copies in shards back into the parameters."""
        for copies, value in self._copies:
            shares = self._rows_per_rank(value)
            columns = copies.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1)
            own = all_to_all(columns, [len(copies)] * self.size, shares, self._process_group(value))
            value.copy_(own)
        self.drop_copies()

    def gather_full(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """Return the full parameter from every rank's shard on its device."""
        spec = self.shard_specs.get(name)
        if spec is None:
            return shard
        shards = shard.new_empty(self.size, *shard.shape)
        dist.all_gather_into_tensor(shards.view(-1), shard.contiguous().view(-1), group=self._group.device_group)
        return torch.cat(shards.unbind(), spec.dim)

    def _rows(self, value: torch.Tensor) -> torch.Tensor:
        """Return [n, C]: about 1/size of the rows with all columns, from every rank's columns [r, C / size]."""
        shares = self._rows_per_rank(value)
        own = shares[self._group.rank]
        received = all_to_all(value.detach(), shares, [own] * self.size, self._process_group(value))
        return received.unflatten(0, (self.size, own)).transpose(0, 1).flatten(1, 2)

    def _rows_per_rank(self, value: torch.Tensor) -> list[int]:
        rows = len(value)
        return [rows * (rank + 1) // self.size - rows * rank // self.size for rank in range(self.size)]

    def _process_group(self, tensor: torch.Tensor) -> Any:
        """Return the process group for a tensor's device."""
        return self._group.cpu_group if tensor.device.type == "cpu" else self._group.device_group


def _elements(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
