"""DeepSpeed's ZeRO: AdamW's moments (stage 1), gradients too (2), and weights too (3) cut over the ranks.

Stages 1 and 2 keep the policy whole and in fp32 on every rank, and compute under autocast, as ddp does. In stage 3 a
pass finds the weights in the compute dtype, gathered a module at a time, with fp32 masters beside them in shards, as
fsdp2 has it: autocast would gather fp32 weights and keep a cast copy of them all. Gradients are summed in fp32 always.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
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
from hwgrpo.training.strategies.deepspeed_shards import Cut, Flattened, Parts
from hwgrpo.training.strategies.optimizer import build_optimizer
from hwgrpo.training.strategies.param_shard import MOMENTS, Piece, moments_of
from hwgrpo.training.strategies.process_group import Processes
from hwgrpo.training.strategies.strategy import clip_shards_by_norm


class Deepspeed(Processes):
    """Train with one process per device under torchrun, by DeepSpeed; see `Strategy` for the methods."""

    name = "deepspeed"
    shards = False
    module: nn.Module
    policy: PolicyModel
    optimizer: torch.optim.AdamW

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
        self.shards = config.trainer.deepspeed.stage == 3
        # The device is chosen already; DeepSpeed, which other packages import as well, would look for one of its own.
        os.environ.setdefault("DS_ACCELERATOR", self.device.type)
        os.environ.setdefault("LOCAL_RANK", str(self.device.index or 0))
        self._merged = deepspeed_config(config)
        super().prepare(config)

    def wrap(self, policy: PolicyModel, config: Config, weights: Rank0Weights | None = None) -> None:
        half = self.shards and policy.compute_dtype != torch.float32
        trainable = [p for p in policy.parameters() if p.requires_grad]
        self._config = with_precision(self._merged, half=half, elements=sum(p.numel() for p in trainable))
        self.record: Mapping[str, Any] = {"deepspeed": self._config}
        # DeepSpeed makes masters of weights that it has rounded already; these are what they were before.
        exact: dict[str, torch.Tensor] = {}
        for filled in self._cut(policy, weights) if weights is not None else [dict(policy.model.named_parameters())]:
            exact |= {name: self._share(p) for name, p in filled.items() if half and p.requires_grad}
        self.policy = policy
        self.optimizer = build_optimizer(policy, config.optim, masters_apart=bool(exact))
        if config.trainer.deepspeed.offload_optimizer:
            _step_on_host(self.optimizer)
        self.module = self._engine = self._started(policy, self.optimizer)
        self._parts: Parts
        if self.shards:
            gathered = self._deepspeed.zero.GatheredParameters
            self._parts = Cut(self._engine.optimizer, gathered, self.rank, self.world_size, self.device)
        else:
            self._parts = Flattened(self._engine.optimizer)
        self._references: list[Any] = []
        if exact:
            for piece in self.pieces():
                piece.values["parameter"].copy_(exact[piece.name])
            self.pieces_written()

    def wrap_reference(self, policy: PolicyModel, weights: Rank0Weights | None = None) -> None:
        if self.shards:
            for _ in self._cut(policy, weights) if weights is not None else ():
                pass
            self._references.append(self._started(policy))

    def _cut(self, policy: PolicyModel, weights: Rank0Weights) -> Iterator[dict[str, nn.Parameter]]:
        """Fill a policy without weights and cut it over the ranks, a decoder layer at a time; yield each before."""
        deepspeed: Any = importlib.import_module("deepspeed")
        filling = weights.filling(policy.model)
        for unit in (*decoder_layers(policy.base), policy.model):
            filled = filling.fill(unit)
            yield filled
            for parameter in filled.values():
                parameter.data = parameter.data.to(policy.compute_dtype)
            with quietly():
                deepspeed.zero.Init(module=unit, config_dict_or_path=self._config, dtype=policy.compute_dtype)

    def _started(self, policy: PolicyModel, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Hand a policy to DeepSpeed; return its engine."""
        if self.device.type == "cpu":
            if int(os.environ["LOCAL_RANK"]) == 0:
                for lock in remove_dead_locks(extensions_root()):
                    print(f"hwgrpo: removed {lock}, which a compilation that was killed has left", file=sys.stderr)
            self.barrier()
        note = compile_note(self.device)
        if note is not None and self.rank == 0:
            print(f"hwgrpo: {note}", file=sys.stderr)
        with quietly():
            self._deepspeed: Any = importlib.import_module("deepspeed")
            silence_expected()
            return self._deepspeed.initialize(model=policy, optimizer=optimizer, config=self._config)[0]

    def _share(self, parameter: torch.Tensor) -> torch.Tensor:
        """Copy the elements of a parameter that stage 3 will give this rank: runs of ceil(elements / ranks)."""
        size = -(-parameter.numel() // self.world_size)
        return parameter.detach().view(-1)[self.rank * size : (self.rank + 1) * size].clone()

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        return clip_shards_by_norm(self._parts.gradients(), max_norm, self.sum)

    def step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        self.discard_gradients()

    def discard_gradients(self) -> None:
        self._parts.drop()

    def pieces(self) -> list[Piece]:
        return [self._piece(name, p) for name, p in self.policy.model.named_parameters() if p.requires_grad]

    def _piece(self, name: str, parameter: torch.Tensor) -> Piece:
        place = self._parts.place(parameter)
        if place is None:
            nothing = torch.empty(0)
            return Piece(name, tuple(parameter.shape), 0, dict.fromkeys(("parameter", *MOMENTS), nothing))
        state = moments_of(self.optimizer, place.flat)
        flats = {"parameter": place.flat.detach(), **{key: state[key] for key in MOMENTS}}
        values = {key: flat.narrow(0, place.first, place.count) for key, flat in flats.items()}
        return Piece(name, place.shape, place.start, values, state["step"])

    def owned_pieces(self) -> list[Piece]:
        return self.pieces()

    def pieces_written(self) -> None:
        self._parts.masters_written()

    def whole(self, trainable_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.policy.model.named_parameters():
            if parameter.requires_grad or not trainable_only:
                for weight in self._parts.whole(parameter):
                    yield name, weight

    def close(self) -> None:
        for engine in (*self.__dict__.pop("_references", ()), self.__dict__.pop("_engine", None)):
            if engine is not None:
                engine.destroy()
        self.__dict__.pop("_parts", None)
        super().close()


def _step_on_host(optimizer: torch.optim.AdamW) -> None:
    """Choose AdamW's fast implementation on a CPU, where its state will be: it was made for the device's."""
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings |= {"fused": True, "foreach": False}
