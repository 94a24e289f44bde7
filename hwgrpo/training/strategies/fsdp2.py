"""Fully sharded data parallelism: each rank holds a shard of every parameter (torch's fully_shard, "FSDP2").

With `trainer.fsdp2.sync_every=update` weights are gathered in an update's first forward pass and kept, and gradients
reduce-scattered in its last backward pass. With `micro_batch` a decoder layer's weights are gathered before each of its
forward and backward passes, and its gradients reduce-scattered as soon as they are computed; everything else, such as
LM head and embeddings, is gathered once per pass of the policy. With `trainer.tensor_parallel_size`, layers are first
sharded over groups of ranks and never gathered over those. Quantized weights are not sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
from hwgrpo.models.vision import vision_modules
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.rank0_weights import Rank0Weights
from hwgrpo.training.policy.sequence_shard import SINGLE_RANK
from hwgrpo.training.strategies.optimizer import Stepping, build_optimizer, clip_shards_by_norm
from hwgrpo.training.strategies.param_shard import (
    ADAMW_STATES,
    ParamShard,
    adamw_state,
    flat,
    has_8_bit_states,
    refresh_states,
)
from hwgrpo.training.strategies.process_group import Processes
from hwgrpo.training.strategies.tensor_parallel_shard import TensorParallelShard


class Fsdp2(Processes, Stepping):
    """Train with one process per device under torchrun, each with a shard of every weight; see `Strategy`."""

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
        self._tensor = TensorParallelShard(self.sequence_group if self.sequence_group.tensor else SINGLE_RANK)
        self._mesh = self._tensor.mesh(self.device.type, self.world_size, config.trainer.process_group_timeout)
        self._options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": settings.reshard_after_forward,
        }
        if settings.offload:
            self._options["offload_policy"] = CPUOffloadPolicy()
        self._syncs_once = settings.sync_every == "update"
        self._tensor.shard_specs = self._shard(policy, weights)
        self.policy = self.module = policy
        policy.set_passes(final_gradients=True)
        self.optimizer = build_optimizer(policy, config.optim, offload=config.trainer.offload)

    def wrap_reference(self, policy: PolicyModel, weights: Rank0Weights | None = None) -> None:
        self._shard(policy, weights)

    def _shard(self, policy: PolicyModel, weights: Rank0Weights | None) -> dict[str, ShardSpec]:
        """Shard a policy over the ranks, materializing one decoder layer at a time.

        Returns:
            Parameter name -> its tensor-parallel shard.
        """
        layers = self._tensor.layer_sharder(policy.base)
        materializer = None if weights is None else weights.materializer(policy.model)
        options = dict(self._options)
        if policy.compute_dtype != torch.float32:
            # Weights are gathered in the compute dtype, gradients summed in fp32. Inputs of losses stay in fp32.
            options["mp_policy"] = MixedPrecisionPolicy(policy.compute_dtype, torch.float32, cast_forward_inputs=False)
        # A tower is gathered with the head: ranks call it for different numbers of images, and would wait for others.
        tower = vision_modules(policy.base, "all")
        for layer in decoder_layers(policy.base):
            if layer in tower:
                continue
            if materializer is not None:
                materializer.materialize(layer)
            if layers is not None:
                layers.shard(layer)
            fully_shard(layer, **options, ignored_params=_quantized(layer))
        # The forward ends with the head and the backward begins with it: it stays gathered in between.
        options["reshard_after_forward"] = False
        if materializer is not None:
            materializer.materialize(policy.model)
        fully_shard(policy, **options, ignored_params=_quantized(policy))
        register_fsdp_forward_method(policy, "hidden_states")  # the self-test of sequence parallelism calls it
        return {} if layers is None else layers.shards

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        if self._syncs_once:
            self._keep_gathered(True)
            for module in self._sharded_modules():
                module.set_reshard_after_backward(last, recurse=False)
                module.set_requires_gradient_sync(last, recurse=False)
        return nullcontext()

    def _keep_gathered(self, keep: bool) -> None:
        """Set whether layers keep their gathered weights after a forward."""
        for module in self._sharded_modules():
            if module is not self.policy:
                module.set_reshard_after_forward(not keep and self._options["reshard_after_forward"], recurse=False)

    def reduce_gradients(self) -> None:
        if self._syncs_once:
            self._keep_gathered(False)  # scoring frees what it has gathered
        self._tensor.reduce_gradients(self._gradients())

    def discard_gradients(self) -> None:
        super().discard_gradients()
        if not self._syncs_once:
            return
        # What an update that was broken off left unreduced, which no public method of FSDPModule discards (torch 2.13).
        for module in self._sharded_modules():
            state: Any = module._get_fsdp_state()
            for group in filter(None, getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]):
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter.unsharded_param.grad = None

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        own, copies = [], []
        for name, gradient in self._gradients():
            (own if self._tensor.owns(name) else copies).append(gradient)
        return clip_shards_by_norm(own, max_norm, self.sum, copies)

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        named = [(name, self.gradient(p)) for name, p in self.policy.model.named_parameters()]
        return [(name, gradient) for name, gradient in named if gradient is not None]

    def param_shards(self) -> list[ParamShard]:
        return self._shards(read_only=False)

    def _shards(self, *, read_only: bool) -> list[ParamShard]:
        shards = []
        self._tensor.drop_copies()
        for name, parameter in self._sharded_parameters():
            if not parameter.requires_grad:
                continue
            state = adamw_state(self.optimizer, parameter, read_only=read_only)
            shard = self._param_shard(name, parameter, state)
            shards.append(replace(shard, in_8_bits=has_8_bit_states(self.optimizer, parameter)))
        return shards

    def _param_shard(self, name: str, parameter: torch.Tensor, state: Mapping[str, torch.Tensor]) -> ParamShard:
        values = {"parameter": parameter, **{key: state[key] for key in ADAMW_STATES if key in state}}
        locals_ = {key: _local(value) if isinstance(value, DTensor) else value for key, value in values.items()}
        shape, start = tuple(parameter.shape), self._start(parameter)
        return self._tensor.param_shard(name, shape, start, locals_, state.get("step"))

    def owned_shards(self) -> list[ParamShard]:
        owned = [shard for shard in self._shards(read_only=True) if self._tensor.owns(shard.name)]
        self._tensor.drop_copies()
        return owned

    def frozen_shards(self, policy: PolicyModel, names: Collection[str], *, owned: bool) -> list[ParamShard]:
        self._tensor.drop_copies()
        shards = [
            self._param_shard(name, parameter, {})
            for name, parameter in self._sharded_parameters(policy)
            if name in names and (self._tensor.owns(name) or not owned)
        ]
        if owned:
            self._tensor.drop_copies()
        return shards

    def _sharded_parameters(self, policy: PolicyModel | None = None) -> list[tuple[str, torch.Tensor]]:
        """Return the model's sharded parameters; a forward without a backward leaves some gathered."""
        policy = policy or self.policy
        for module in self._sharded_modules(policy):
            module.reshard()
        return list(policy.model.named_parameters())

    def _sharded_modules(self, policy: PolicyModel | None = None) -> Iterator[FSDPModule]:
        for module in (policy or self.policy).modules():
            if isinstance(module, FSDPModule):
                yield module

    def _start(self, parameter: torch.Tensor) -> int:
        """Return this rank's first element: rows are split into runs of ceil(rows / ranks)."""
        rows = parameter.shape[0]
        first = min(self._mesh.get_local_rank() * -(-rows // self._mesh.size()), rows)
        return first * (parameter.numel() // max(rows, 1))

    def refresh_from_shards(self) -> None:
        self._tensor.write_back_copies()
        refresh_states(self.optimizer)

    def gather_full_parameters(self, trainable_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._sharded_parameters():
            if not isinstance(parameter, DTensor):
                if not trainable_only:
                    yield name, parameter
            elif parameter.requires_grad or not trainable_only:
                # shards offloaded to the host are gathered by the device's group
                mine = flat(_local(parameter)).to(self.device)
                rows = parameter.shape[0]
                size = -(-rows // self._mesh.size()) * (parameter.numel() // max(rows, 1))
                padded = torch.nn.functional.pad(mine, (0, size - mine.numel()))
                gathered = mine.new_empty(size * self._mesh.size())
                dist.all_gather_into_tensor(gathered, padded, group=self._mesh.get_group())
                yield name, self._tensor.gather_full(name, gathered[: parameter.numel()].view(parameter.shape))


def _quantized(module: nn.Module) -> set[nn.Parameter]:
    """Return the quantized weights, which every rank holds unsharded: they are frozen, and small."""
    return {parameter for parameter in module.parameters() if not parameter.is_floating_point()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
