"""Fully sharded data parallel: each rank holds a part of every parameter (torch's fully_shard, "FSDP2").

A decoder layer's weights are gathered before its forward and its backward, and its gradients reduced to the rank that
holds each part as soon as they are there. Everything else, LM head and embeddings among it, is gathered once for each
pass of the policy. With `trainer.tensor_parallel_size` layers are cut over groups of ranks first, and never whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.models.layers import decoder_layers
from hwgrpo.models.tensor_parallel import ShardSpec
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.rank0_weights import Rank0Weights
from hwgrpo.training.policy.sequence_group import ALONE
from hwgrpo.training.strategies.optimizer import build_optimizer
from hwgrpo.training.strategies.param_shard import MOMENTS, Piece, flat, moments_of
from hwgrpo.training.strategies.process_group import Processes
from hwgrpo.training.strategies.stepping import Stepping
from hwgrpo.training.strategies.strategy import clip_shards_by_norm
from hwgrpo.training.strategies.tensor_parallel_shard import TensorCut


class Fsdp2(Processes, Stepping):
    """Train with one process per device under torchrun, each with a part of every weight; see `Strategy`."""

    name = "fsdp2"
    shards = True
    module: nn.Module
    policy: PolicyModel

    @classmethod
    def check(cls, config: Config, device: torch.device) -> None:
        if config.trainer.fsdp2.offload and device.type == "cpu":
            raise ConfigError(
                "trainer.fsdp2.offload=true: on a CPU parameters are in host memory already; leave it out"
            )
        super().check(config, device)

    def wrap(self, policy: PolicyModel, config: Config, weights: Rank0Weights | None = None) -> None:
        settings = config.trainer.fsdp2
        self._tensor = TensorCut(self.sequence_group if self.sequence_group.tensor else ALONE)
        self._mesh = self._tensor.mesh(self.device.type, self.world_size, config.trainer.process_group_timeout)
        self._options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": settings.reshard_after_forward,
        }
        if settings.offload:
            self._options["offload_policy"] = CPUOffloadPolicy()
        self._tensor.cuts = self._shard(policy, weights)
        self.policy = self.module = policy
        self.optimizer = build_optimizer(policy, config.optim)

    def wrap_reference(self, policy: PolicyModel, weights: Rank0Weights | None = None) -> None:
        self._shard(policy, weights)

    def _shard(self, policy: PolicyModel, weights: Rank0Weights | None) -> dict[str, ShardSpec]:
        """Shard a policy over the ranks, a decoder layer at a time; each is filled just before.

        Returns:
            What of it was cut over a group of ranks first.
        """
        layers = self._tensor.layers(policy.base)
        filling = None if weights is None else weights.filling(policy.model)
        options = dict(self._options)
        if policy.compute_dtype != torch.float32:
            # Weights travel in the compute dtype, gradients are summed in fp32. What losses read stays in fp32.
            options["mp_policy"] = MixedPrecisionPolicy(policy.compute_dtype, torch.float32, cast_forward_inputs=False)
        for layer in decoder_layers(policy.base):
            if filling is not None:
                filling.fill(layer)
            if layers is not None:
                layers.shard(layer)
            fully_shard(layer, **options)
        # The head is read at a forward's end and the backward begins with it: between the two it stays gathered.
        options["reshard_after_forward"] = False
        if filling is not None:
            filling.fill(policy.model)
        fully_shard(policy, **options)
        register_fsdp_forward_method(policy, "hidden_states")  # the trial of shared sequences calls it
        return {} if layers is None else layers.shards

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()  # each pass reduces its gradients: until the last, they would be whole on every rank

    def reduce_gradients(self) -> None:
        self._tensor.reduce(self._gradients())

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        own, copies = [], []
        for name, gradient in self._gradients():
            (own if self._tensor.owns(name) else copies).append(gradient)
        return clip_shards_by_norm(own, max_norm, self.sum, copies)

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        named = self.policy.model.named_parameters()
        return [(name, _local(p.grad)) for name, p in named if p.grad is not None]

    def pieces(self) -> list[Piece]:
        pieces = []
        self._tensor.forget()
        for name, parameter in self._parts():
            if not parameter.requires_grad:
                continue
            state = moments_of(self.optimizer, parameter)
            values = {"parameter": parameter, **{key: state[key] for key in MOMENTS}}
            locals_ = {key: _local(value) for key, value in values.items()}
            pieces.append(
                self._tensor.piece(name, tuple(parameter.shape), self._start(parameter), locals_, state["step"])
            )
        return pieces

    def owned_pieces(self) -> list[Piece]:
        owned = [piece for piece in self.pieces() if self._tensor.owns(piece.name)]
        self._tensor.forget()
        return owned

    def _parts(self) -> list[tuple[str, torch.Tensor]]:
        """Return the model's parameters as they are sharded; a forward without a backward leaves some gathered."""
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return list(self.policy.model.named_parameters())

    def _start(self, parameter: torch.Tensor) -> int:
        """Return the first element that this rank holds: rows are cut into runs of ceil(rows / ranks)."""
        rows = parameter.shape[0]
        first = min(self._mesh.get_local_rank() * -(-rows // self._mesh.size()), rows)
        return first * (parameter.numel() // max(rows, 1))

    def pieces_written(self) -> None:
        self._tensor.take_back()

    def whole(self, trainable_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parts():
            if parameter.requires_grad or not trainable_only:
                # parts that are kept on the host are gathered by the device's group
                mine = flat(_local(parameter)).to(self.device)
                rows = parameter.shape[0]
                size = -(-rows // self._mesh.size()) * (parameter.numel() // max(rows, 1))
                padded = torch.nn.functional.pad(mine, (0, size - mine.numel()))
                gathered = mine.new_empty(size * self._mesh.size())
                dist.all_gather_into_tensor(gathered, padded, group=self._mesh.get_group())
                yield name, self._tensor.whole(name, gathered[: parameter.numel()].view(parameter.shape))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
