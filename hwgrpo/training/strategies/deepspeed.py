"""DeepSpeed's ZeRO: shards optimizer states (stage 1), gradients too (2), and weights too (3).

Stages 1 and 2 keep the full policy in fp32 on every rank and compute under autocast, as ddp does. Stage 3 gathers
weights in the compute dtype, one module at a time, and keeps sharded fp32 masters, as fsdp2 does: autocast would gather
fp32 weights and keep a cast copy of them all. Gradients are always summed in fp32. They are reduced once per update
under stage 1, and under stage 2 with `trainer.deepspeed.sync_every=update`; else after each backward pass.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from hwgrpo_backends.device import runtime
from torch import nn

from hwgrpo.config import Config
from hwgrpo.config.deepspeed_json import deepspeed_config, with_precision
from hwgrpo.errors import ConfigError
from hwgrpo.models.layers import decoder_layers
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.rank0_weights import Rank0Weights
from hwgrpo.training.strategies.deepspeed_host import (
    check_needs,
    compile_note,
    extensions_root,
    quietly,
    remove_dead_locks,
    silence_expected,
)
from hwgrpo.training.strategies.deepspeed_shards import Stage3Shards, Stage12Shards, ZeroShards
from hwgrpo.training.strategies.optimizer import build_optimizer, clip_shards_by_norm, set_learning_rate
from hwgrpo.training.strategies.param_shard import (
    ADAMW_STATES,
    ParamShard,
    adamw_state,
    frozen_param_shards,
    partition_shards,
)
from hwgrpo.training.strategies.process_group import Processes


class Deepspeed(Processes):
    """Train with one process per device under torchrun, by DeepSpeed; see `Strategy` for the methods."""

    name = "deepspeed"
    shards = False
    module: nn.Module
    policy: PolicyModel
    optimizer: torch.optim.Optimizer
    _coalesced: ExitStack | None = None
    """DeepSpeed's block of the passes whose gradients it reduces together at the end; None: outside of an update."""

    @classmethod
    def check(cls, config: Config, device: torch.device) -> None:
        settings = config.trainer.deepspeed
        if device.type == "cpu":
            for key in ("offload_optimizer", "offload_parameters"):
                if getattr(settings, key):
                    raise ConfigError(
                        f"trainer.deepspeed.{key}=true: on a CPU all of it is in host memory already; leave it out"
                    )
        check_needs(device)
        super().check(config, device)

    def prepare(self, config: Config) -> None:
        settings = config.trainer.deepspeed
        self.shards = settings.stage == 3
        self._offloads = settings.offload_optimizer
        self._reduces_once = settings.stage == 1 or (settings.stage == 2 and settings.sync_every == "update")
        # The device is set already; DeepSpeed, which other packages import as well, would detect one by itself.
        os.environ.setdefault("DS_ACCELERATOR", self.device.type)
        os.environ.setdefault("LOCAL_RANK", str(self.device.index or 0))
        self._merged = deepspeed_config(config)
        super().prepare(config)
        self.has_collectives_in_passes = not self._reduces_once or self.sequence_group.size > 1

    def wrap(self, policy: PolicyModel, config: Config, weights: Rank0Weights | None = None) -> None:
        half = self.shards and policy.compute_dtype != torch.float32
        trainable = [p for p in policy.parameters() if p.requires_grad]
        self._config = with_precision(self._merged, half=half, elements=sum(p.numel() for p in trainable))
        self.record: Mapping[str, Any] = {"deepspeed": self._config}
        # DeepSpeed makes masters from weights that it has already rounded; these are the values before rounding.
        unrounded: dict[str, torch.Tensor] = {}
        units = [dict(policy.model.named_parameters())] if weights is None else self._shard_units(policy, weights)
        for unit in units:
            unrounded |= {name: self._local_elements(p) for name, p in unit.items() if half and p.requires_grad}
        self.policy = policy
        self.optimizer = build_optimizer(policy, config.optim, separate_masters=bool(unrounded))
        if config.trainer.deepspeed.offload_optimizer:
            _use_cpu_implementation(self.optimizer)
        self.module = self._engine = self._initialize_engine(policy, self.optimizer)
        self._zero_shards: ZeroShards
        if self.shards:
            gathered = self._deepspeed.zero.GatheredParameters
            self._zero_shards = Stage3Shards(self._engine.optimizer, gathered, self.rank, self.world_size, self.device)
        else:
            self._zero_shards = Stage12Shards(self._engine.optimizer)
        self._references: list[Any] = []
        if unrounded:
            for shard in self.param_shards():
                shard.values["parameter"].copy_(unrounded[shard.name])
            self.refresh_from_shards()

    def wrap_reference(self, policy: PolicyModel, weights: Rank0Weights | None = None) -> None:
        if self.shards:
            for _ in self._shard_units(policy, weights) if weights is not None else ():
                pass
            self._references.append(self._initialize_engine(policy))

    def _shard_units(self, policy: PolicyModel, weights: Rank0Weights) -> Iterator[dict[str, nn.Parameter]]:
        """Materialize and shard a policy, a decoder layer at a time; yield each layer's full parameters before."""
        deepspeed: Any = importlib.import_module("deepspeed")
        materializer = weights.materializer(policy.model)
        for unit in (*decoder_layers(policy.base), policy.model):
            parameters = materializer.materialize(unit)
            yield parameters
            for parameter in parameters.values():
                parameter.data = parameter.data.to(policy.compute_dtype)
            with quietly():
                deepspeed.zero.Init(module=unit, config_dict_or_path=self._config, dtype=policy.compute_dtype)

    def _initialize_engine(self, policy: PolicyModel, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Return DeepSpeed's engine for a policy."""
        if self.device.type == "cpu":
            if int(os.environ["LOCAL_RANK"]) == 0:
                for lock in remove_dead_locks(extensions_root()):
                    print(f"hwgrpo: removed {lock}, left by a compilation that was killed", file=sys.stderr)
            self.barrier()
        note = compile_note(self.device)
        if note is not None and self.rank == 0:
            print(f"hwgrpo: {note}", file=sys.stderr)
        with quietly():
            self._deepspeed: Any = importlib.import_module("deepspeed")
            silence_expected()
            return self._deepspeed.initialize(model=policy, optimizer=optimizer, config=self._config)[0]

    def _local_elements(self, parameter: torch.Tensor) -> torch.Tensor:
        """Copy this rank's elements of a parameter under stage 3: a run of ceil(elements / ranks)."""
        size = -(-parameter.numel() // self.world_size)
        return parameter.detach().view(-1)[self.rank * size : (self.rank + 1) * size].clone()

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        if not self._reduces_once:
            self._engine.set_gradient_accumulation_boundary(last)
        elif self._coalesced is None:
            self._coalesced = ExitStack()
            self._coalesced.enter_context(self._engine.coalesce_grad_reduction())
        return nullcontext()

    def reduce_gradients(self) -> None:
        if self._coalesced is not None:
            coalesced, self._coalesced = self._coalesced, None
            coalesced.close()
        if self._offloads:
            runtime(self.device).synchronize(self.device)  # its copies of gradients to the host have arrived

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        return clip_shards_by_norm(self._zero_shards.gradients(), max_norm, self.sum)

    def step(self, lr: float) -> None:
        set_learning_rate(self.optimizer, lr)
        self._engine.step()
        self.discard_gradients()

    def discard_gradients(self) -> None:
        self._zero_shards.discard_gradients()

    def param_shards(self) -> list[ParamShard]:
        return [self._param_shard(name, p) for name, p in self.policy.model.named_parameters() if p.requires_grad]

    def _param_shard(self, name: str, parameter: torch.Tensor) -> ParamShard:
        location = self._zero_shards.locate(parameter)
        if location is None:
            nothing = torch.empty(0)
            return ParamShard(name, tuple(parameter.shape), 0, dict.fromkeys(("parameter", *ADAMW_STATES), nothing))
        state = adamw_state(self.optimizer, location.flat)
        flats = {"parameter": location.flat.detach(), **{key: state[key] for key in ADAMW_STATES}}
        values = {key: flat.narrow(0, location.first, location.count) for key, flat in flats.items()}
        return ParamShard(name, location.shape, location.start, values, state["step"])

    def owned_shards(self) -> list[ParamShard]:
        return self.param_shards()

    def frozen_shards(self, policy: PolicyModel, names: Collection[str], *, owned: bool) -> list[ParamShard]:
        assert not self.shards, "stage 3 holds frozen parameters in the compute dtype"
        shards = frozen_param_shards(policy.model, names)
        return partition_shards(shards, self.world_size)[self.rank] if owned else shards

    def refresh_from_shards(self) -> None:
        self._zero_shards.refresh_parameters()

    def gather_full_parameters(self, trainable_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.policy.model.named_parameters():
            if parameter.requires_grad or not trainable_only:
                for weight in self._zero_shards.gather_full(parameter):
                    yield name, weight

    def close(self) -> None:
        if self._coalesced is not None:  # an update was broken off, and other ranks may not reduce theirs
            self.discard_gradients()
            self.reduce_gradients()
        for engine in (*self.__dict__.pop("_references", ()), self.__dict__.pop("_engine", None)):
            if engine is not None:
                engine.destroy()
        self.__dict__.pop("_zero_shards", None)
        super().close()


def _use_cpu_implementation(optimizer: torch.optim.Optimizer) -> None:
    """Select AdamW's fused CPU implementation: its states are offloaded, but it was made for the device."""
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings |= {"fused": True, "foreach": False}
