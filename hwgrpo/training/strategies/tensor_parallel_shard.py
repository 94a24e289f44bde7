"""A strategy's parameters where decoder layers are cut over a group of ranks (`trainer.tensor_parallel_size`)."""

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
from hwgrpo.training.policy.sequence_group import SequenceGroup
from hwgrpo.training.strategies.param_shard import Piece, flat


class TensorCut:
    """What of each parameter this rank's group leaves to it; a rank alone has all of it.

    Args:
        group: the ranks that layers are cut over.
    """

    def __init__(self, group: SequenceGroup) -> None:
        self._group = group
        self.size = group.size
        self.cuts: Mapping[str, ShardSpec] = {}
        """The parameters that are cut, by name; of others every rank of the group has the same."""
        self._lent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def mesh(self, device_type: str, ranks: int, timeout: float) -> DeviceMesh:
        """Return the ranks that have the same part of every layer as this one.

        Args:
            device_type: as torch names it.
            ranks: of the run.
            timeout: seconds that they wait for each other.
        """
        if self.size == 1:
            return init_device_mesh(device_type, (ranks,))
        mesh = init_device_mesh(device_type, (ranks // self.size, self.size), mesh_dim_names=("same", "group"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch can set it for two libraries; others keep their own
            for group in mesh.get_all_groups():
                c10d._set_pg_timeout(timedelta(seconds=timeout), group)
        return mesh["same"]

    def layers(self, base: Any) -> TensorParallel | None:
        """Return what cuts the decoder layers of a transformers model; None for a rank alone.

        Raises:
            ConfigError: transformers has no plan for it, or one that cannot be followed.
        """
        if self.size == 1:
            return None
        return TensorParallel(base, self.size, self._group.rank, self._group.device_group)

    def owns(self, name: str) -> bool:
        """Whether this rank's part of a parameter is no copy of one that another rank of the group has."""
        return self._group.rank == 0 or name in self.cuts

    def reduce(self, gradients: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Make gradients that are means over groups those over all ranks, once an update.

        Each rank of a group has seen all of the group's tokens with its part of a parameter that is cut, and its own
        tokens alone with what is not.
        """
        if self.size == 1:
            return
        apart = [gradient for name, gradient in gradients if name not in self.cuts]
        if apart:
            joined = torch.cat([gradient.flatten() for gradient in apart])
            dist.all_reduce(joined, group=self._of(joined))
            for gradient, total in zip(apart, joined.split([g.numel() for g in apart]), strict=True):
                gradient.copy_(total.view_as(gradient))
        for _, gradient in gradients:
            gradient.div_(self.size)

    def piece(
        self, name: str, shape: tuple[int, ...], start: int, values: Mapping[str, torch.Tensor], step: torch.Tensor
    ) -> Piece:
        """Return a run of a parameter's elements; every rank of the group asks for the same ones in the same order.

        Args:
            name: of the parameter.
            shape: of this rank's part of it, and of all that its strategy cuts that into.
            start: where `values` begin in that part.
            values: rows of it, live, by what they are of; where columns are cut, the piece has copies of as many
                elements instead, which `take_back` puts in place.
            step: of the optimizer.
        """
        cut = self.cuts.get(name)
        if cut is None:
            return Piece(name, shape, start, {key: flat(value) for key, value in values.items()}, step)
        if cut.dim == 0:
            start += self._group.rank * _elements(shape)
            return Piece(name, cut.shape, start, {key: flat(value) for key, value in values.items()}, step)
        first = start // shape[1] + sum(self._shares(values["parameter"])[: self._group.rank])
        lent = {key: self._rows(value) for key, value in values.items()}
        self._lent += [(lent[key], value.detach()) for key, value in values.items()]
        return Piece(name, cut.shape, first * cut.shape[1], {key: flat(value) for key, value in lent.items()}, step)

    def forget(self) -> None:
        """Drop the copies in pieces: nobody will write into them."""
        self._lent = []

    def take_back(self) -> None:
        """Put what was written into the copies in pieces where it belongs."""
        for lent, value in self._lent:
            shares = self._shares(value)
            columns = lent.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1)
            own = all_to_all(columns, [len(lent)] * self.size, shares, self._of(value))
            value.copy_(own)
        self.forget()

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return a parameter whole, of every rank's part of it on its device."""
        cut = self.cuts.get(name)
        if cut is None:
            return part
        parts = part.new_empty(self.size, *part.shape)
        dist.all_gather_into_tensor(parts.view(-1), part.contiguous().view(-1), group=self._group.device_group)
        return torch.cat(parts.unbind(), cut.dim)

    def _rows(self, value: torch.Tensor) -> torch.Tensor:
        """Return [n, C]: about 1/size of whole rows, of every rank's columns [r, C / size] of them."""
        shares = self._shares(value)
        own = shares[self._group.rank]
        received = all_to_all(value.detach(), shares, [own] * self.size, self._of(value))
        return received.unflatten(0, (self.size, own)).transpose(0, 1).flatten(1, 2)

    def _shares(self, value: torch.Tensor) -> list[int]:
        rows = len(value)
        return [rows * (rank + 1) // self.size - rows * rank // self.size for rank in range(self.size)]

    def _of(self, tensor: torch.Tensor) -> Any:
        """Return the process group that a tensor can travel in."""
        return self._group.cpu_group if tensor.device.type == "cpu" else self._group.device_group


def _elements(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
