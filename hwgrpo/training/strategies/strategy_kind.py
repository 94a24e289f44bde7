"""Properties of a strategy before it is made, and the built-in strategies. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hwgrpo.config import Config
from hwgrpo.config.deepspeed_json import deepspeed_config
from hwgrpo.config.schema import TrainerConfig
from hwgrpo.errors import ConfigError
from hwgrpo.registry import import_target
from hwgrpo.training.strategies.sharding import Sharding

if TYPE_CHECKING:
    import torch

    from hwgrpo.training.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class StrategyKind:
    """A strategy: how it shards state, which settings it rejects, and how it is made.

    An entry of `hwgrpo.catalog.STRATEGIES`.
    """

    maker: str | Callable[..., Strategy]
    """`(torch device, communication backend, timeout in seconds) -> Strategy`, or its name `module:callable`."""
    sharding: Callable[[TrainerConfig, int], Sharding]
    """`(settings, number of devices) -> Sharding` of a run's state."""
    one_process: bool = False
    """It trains in one process instead of several."""
    shards_layers: bool = False
    """It supports `trainer.tensor_parallel_size`."""
    takes_quantized: bool = False
    """It supports `model.quantize`."""
    full_matrices: bool = False
    """It supports `optim.name=muon`."""
    holds_states: bool = False
    """It supports `trainer.offload` and `optim.name=adamw_8bit`."""
    alternatives: Callable[[TrainerConfig], Sequence[Mapping[str, Any]]] = lambda _: ({},)
    """`settings -> values for those at auto`, as keys below `trainer`, from the fastest to those of least memory."""
    refuse: Callable[[Config], Any] | None = None
    """Raises ConfigError for settings that it does not support."""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Names for `hwgrpo plan --strategy` -> settings below `trainer` that differ between them, from the simplest on."""

    def make(self, device: torch.device, comm_backend: str, *timeout: float) -> Strategy:
        """Join the processes of a run and return their strategy."""
        return self._maker()(device, comm_backend, *timeout)

    def check_host(self, config: Config, device: torch.device) -> None:
        """Check that this machine meets the requirements, if the maker has a method `check`.

        Raises:
            ConfigError: a requirement is not met.
        """
        check = getattr(self._maker(), "check", None)
        if check is not None:
            check(config, device)

    def _maker(self) -> Callable[..., Strategy]:
        return import_target(self.maker) if isinstance(self.maker, str) else self.maker


def _replicated(trainer: TrainerConfig, devices: int) -> Sharding:
    return Sharding(
        offloads_optimizer=trainer.offload != "none", offloads_gradients=trainer.offload == "gradients", ranks=devices
    )


def _fsdp2(trainer: TrainerConfig, devices: int) -> Sharding:
    fsdp2 = trainer.fsdp2
    once = fsdp2.sync_every == "update"
    return Sharding(
        parameters=devices,
        gradients=devices,
        optimizer_states=devices,
        # the current layer and the prefetched one
        gathered_units=2 if fsdp2.reshard_after_forward and not once else "all",
        syncs_once=once,
        offloads_optimizer=fsdp2.offload or trainer.offload != "none",
        offloads_gradients=fsdp2.offload or trainer.offload == "gradients",
        offloads_parameters=fsdp2.offload,
        by_rows=True,
        tensor=trainer.tensor_parallel_size,
        ranks=devices,
    )


def _fsdp2_alternatives(trainer: TrainerConfig) -> Sequence[Mapping[str, Any]]:
    if trainer.fsdp2.sync_every != "auto":
        return ({},)
    each_pass = {"fsdp2.sync_every": "micro_batch"}
    on_host = trainer.fsdp2.offload or trainer.offload == "gradients"
    return (each_pass,) if on_host else ({"fsdp2.sync_every": "update"}, each_pass)


def _refuse_for_fsdp2(config: Config) -> None:
    fsdp2 = config.trainer.fsdp2
    if fsdp2.offload and config.trainer.offload != "none":
        raise ConfigError(
            f"trainer.offload={config.trainer.offload!r} with trainer.fsdp2.offload=true, which holds parameters, "
            "gradients and optimizer states in host memory: use one of them"
        )
    if fsdp2.sync_every == "update" and (fsdp2.offload or config.trainer.offload == "gradients"):
        key = "fsdp2.offload=true" if fsdp2.offload else "offload='gradients'"
        raise ConfigError(
            f"trainer.{key} with trainer.fsdp2.sync_every='update', which keeps all weights and gradients on the "
            "device: use auto or micro_batch"
        )


def _deepspeed(trainer: TrainerConfig, devices: int) -> Sharding:
    deepspeed = trainer.deepspeed
    return Sharding(
        parameters=devices if deepspeed.stage >= 3 else 1,
        gradients=devices if deepspeed.stage >= 2 else 1,
        optimizer_states=devices,
        masters=devices,
        in_compute_dtype=deepspeed.stage >= 3,
        gathered_units=2 if deepspeed.stage >= 3 else None,
        syncs_once=deepspeed.stage == 2 and deepspeed.sync_every == "update",
        keeps_gradients=True,
        offloads_optimizer=deepspeed.offload_optimizer or deepspeed.offload_parameters,
        offloads_gradients=deepspeed.offload_parameters,
        offloads_parameters=deepspeed.offload_parameters,
        ranks=devices,
    )


def _deepspeed_alternatives(trainer: TrainerConfig) -> Sequence[Mapping[str, Any]]:
    if trainer.deepspeed.stage != 2 or trainer.deepspeed.sync_every != "auto":
        return ({},)
    return tuple({"deepspeed.sync_every": each} for each in ("update", "micro_batch"))


OFFLOADED = {on: {"deepspeed.offload_optimizer": on, "deepspeed.offload_parameters": on} for on in (False, True)}

SINGLE = StrategyKind(
    maker="hwgrpo.training.strategies.single:Single",
    sharding=_replicated,
    one_process=True,
    full_matrices=True,
    takes_quantized=True,
    holds_states=True,
    variants={"single": {}},
)
DDP = StrategyKind(
    maker="hwgrpo.training.strategies.ddp:Ddp",
    sharding=_replicated,
    full_matrices=True,
    takes_quantized=True,
    holds_states=True,
    variants={"ddp": {}},
)
FSDP2 = StrategyKind(
    maker="hwgrpo.training.strategies.fsdp2:Fsdp2",
    sharding=_fsdp2,
    shards_layers=True,
    takes_quantized=True,
    holds_states=True,
    alternatives=_fsdp2_alternatives,
    refuse=_refuse_for_fsdp2,
    variants={"fsdp2": {"fsdp2.offload": False}, "fsdp2+offload": {"fsdp2.offload": True}},
)
DEEPSPEED = StrategyKind(
    maker="hwgrpo.training.strategies.deepspeed:Deepspeed",
    sharding=_deepspeed,
    alternatives=_deepspeed_alternatives,
    refuse=deepspeed_config,
    variants={
        **{f"zero{stage}": {"deepspeed.stage": stage, **OFFLOADED[False]} for stage in (1, 2, 3)},
        "zero3+offload": {"deepspeed.stage": 3, **OFFLOADED[True]},
    },
)
