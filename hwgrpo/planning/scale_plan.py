"""Plans a run on devices that need not be here: memory and time per chip, and alternatives that fit (`hwgrpo plan`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hwgrpo_backends import Backend
from hwgrpo_backends.decide import AUTO
from hwgrpo_backends.peaks import Chip

from hwgrpo.config import Config
from hwgrpo.config.derived import ranks_per_sequence
from hwgrpo.config.schema import RolloutConfig
from hwgrpo.config.validate import check_strategy, check_world_size
from hwgrpo.errors import ConfigError
from hwgrpo.planning.engine_choice import resolve_engine, rollout_sizes
from hwgrpo.planning.engine_share import engine_room
from hwgrpo.planning.memory import Memory, Work, estimate
from hwgrpo.planning.model_shape import ModelShape
from hwgrpo.planning.planned_device import USABLE, PlannedDevice, RunDevice, ranks_of_host
from hwgrpo.planning.planned_sharding import (
    changed_settings,
    sharding_of,
    variant_settings,
)
from hwgrpo.planning.planner import Planner
from hwgrpo.planning.reward_model_memory import uncounted_reward_models
from hwgrpo.planning.step_time import Rates, step_seconds
from hwgrpo.planning.strategy_choice import saved_settings
from hwgrpo.rollout.engine_kind import engine_kind
from hwgrpo.rollout.shared_devices import shares_device
from hwgrpo.training.strategies.sharding import Sharding

DEVICES_OF_A_HOST = 8
"""Devices of a host that a plan assumes where it proposes more devices than it was asked for."""


@dataclass(frozen=True)
class Cluster:
    """The devices of a planned run, and assumptions about them."""

    devices: int
    """Number of training devices."""
    nodes: int = 1
    strategy: str | None = None
    """A name of `strategy_variants`; None: the configuration's strategy."""
    separate: bool = False
    """Rollout runs on separate devices, by another engine."""
    samplers: int = 0
    """Number of rollout devices; 0: as few as fit weights and cache."""
    supervised: bool = False
    """The run is one of `hwgrpo sft`, which samples nothing."""
    image_tokens: int | None = None
    """Tokens of the image of each prompt, 0: there is none; None: as many as the settings allow."""
    usable: float = USABLE
    rates: Rates = field(default_factory=Rates)

    def device(self, memory: int | None) -> PlannedDevice:
        """Return a training device with this many bytes of memory; None: not known."""
        return PlannedDevice(memory, self.devices // self.nodes, self.usable)


@dataclass(frozen=True)
class ChipPlan:
    """A run on one kind of chip."""

    name: str
    config: Config
    """The settings, with the engine that `rollout.engine=auto` selects on this chip."""
    engine_notes: tuple[str, ...]
    """Why `rollout.engine=auto` is this engine; empty if an engine is named."""
    engine_share: float | None
    """Share of a training device's memory for the engine; None where it is set, or the engine has no share there."""
    work: Work
    strategy: str
    sharding: Sharding
    memory: Memory
    limit: float | None
    """Bytes of the chip's memory; None if not certain."""
    fits: bool | None
    """Whether a step fits into memory; None if the limit is unknown."""
    seconds: dict[str, float | None]
    """Seconds per stage of a step; None where the chip's rate is unknown."""
    samplers: int
    """Separate rollout devices; 0: the training devices sample."""
    instead: str
    """An alternative that fits, as text; empty if this fits."""

    @property
    def step(self) -> float | None:
        """Seconds of a step; None if a stage is unknown."""
        parts = list(self.seconds.values())
        return None if any(part is None for part in parts) else sum(part for part in parts if part is not None)


@dataclass(frozen=True)
class ScalePlan:
    """A recipe on a cluster."""

    model: str
    shape: ModelShape
    layout: str
    shared_by: int
    """Devices that share a sequence."""
    shards_layers: bool
    """They share it by tensor parallelism, not by sequence parallelism."""
    cluster: Cluster
    chips: tuple[ChipPlan, ...]
    padding: str | None
    """Why more devices do not reduce the state per device of the first chip, if so."""
    rollout_bytes: int
    """Bytes of weights and cache on separate rollout devices; else 0."""
    uncounted: tuple[str, ...] = ()
    """Reward models whose memory is not known, as lines."""

    @property
    def work(self) -> Work:
        """The work of a device of the first chip."""
        return self.chips[0].work

    @property
    def strategy(self) -> str:
        """The strategy on the chips; "auto" if they differ."""
        names = {chip.strategy for chip in self.chips}
        return names.pop() if len(names) == 1 else "auto"

    def to_json(self) -> dict[str, Any]:
        """Return it as the JSON document `hwgrpo.plan/1`; bytes and seconds."""
        c, shared = self.cluster, "colocated" if self.work.beside else "local"
        return {
            "schema": "hwgrpo.plan/1",
            "model": self.model,
            "parameters": self.shape.parameters,
            "trainable": self.shape.trainable,
            "devices": c.devices,
            "nodes": c.nodes,
            "strategy": self.strategy,
            "padding": self.padding,
            "rollout": "none" if c.supervised else "separate" if self.work.is_elsewhere else shared,
            "rollout_bytes": self.rollout_bytes,
            "dtype": str(self.work.dtype).removeprefix("torch."),
            "not_counted": list(self.uncounted),
            "image_tokens": sum(self.work.images),
            "layout": self.layout,
            "sequence_parallel_size": 1 if self.shards_layers else self.shared_by,
            "tensor_parallel_size": self.shared_by if self.shards_layers else 1,
            "assumed": {"usable": c.usable, **asdict(c.rates)},
            "chips": [
                {
                    "name": chip.name,
                    "strategy": chip.strategy,
                    "engine": None if c.supervised else chip.config.rollout.engine,
                    "rollout_tensor_parallel_size": chip.config.rollout.tensor_parallel_size,
                    "gpu_memory_utilization": chip.engine_share,
                    "memory": chip.limit,
                    "peak": chip.memory.peak,
                    "rollout_peak": chip.memory.rollout_peak,
                    "rewards_peak": chip.memory.rewards_peak,
                    "update_peak": chip.memory.update_peak,
                    "components": {
                        "always": chip.memory.always,
                        "rollout": chip.memory.rollout,
                        "rewards": chip.memory.rewards,
                        "update": chip.memory.update,
                        "optimizer": chip.memory.step,
                        "host": chip.memory.host,
                        "loading": chip.memory.loading,
                    },
                    "fits": chip.fits,
                    "instead": chip.instead,
                    "rollout_devices": chip.samplers,
                    "seconds": chip.seconds,
                    "step": chip.step,
                }
                for chip in self.chips
            ],
        }


def plan_at_scale(config: Config, cluster: Cluster, chips: Sequence[tuple[Chip, Backend]]) -> ScalePlan:
    """Plan a run on a cluster, for each of some kinds of chips.

    Args:
        config: the run's settings; its data may be missing.
        cluster: number of devices, and assumptions.
        chips: rows of the backends' tables, or made by the user, each with its backend; at least one.

    Raises:
        ConfigError: batch sizes, strategy, sequence or tensor parallelism do not fit the devices or the model.
    """
    check_world_size(config, cluster.devices)
    if cluster.strategy is not None:
        config = changed_settings(config, {"trainer": variant_settings(cluster.strategy, config.trainer)})
        try:
            check_strategy(config)
        except ConfigError as error:
            raise ConfigError(f"--strategy {cluster.strategy}: {error}") from None
    planner = Planner(config, supervised=cluster.supervised, image_tokens=cluster.image_tokens)
    rates = replace(cluster.rates, mfu=cluster.rates.matrix_share(planner.shape))
    cluster = replace(cluster, rates=rates)
    for _, backend in chips:
        planner.check(backend)
    results = tuple(_plan_chip(planner, cluster, chip, backend) for chip, backend in chips)
    first, backend = results[0], chips[0][1]
    return ScalePlan(
        model=config.model.path,
        shape=planner.shape,
        layout=planner.layout(backend).name,
        shared_by=ranks_per_sequence(config),
        shards_layers=config.trainer.tensor_parallel_size > 1,
        cluster=cluster,
        padding=first.sharding.padding_note(planner.shape.sharded_units),
        chips=results,
        rollout_bytes=planner.rollout_bytes(first.work, cluster.devices) if first.work.is_elsewhere else 0,
        uncounted=tuple(uncounted_reward_models(config.reward, config.model)),
    )


def with_engine(planner: Planner, backend: Backend, devices: int, device: RunDevice) -> tuple[Planner, list[str]]:
    """Return a planner with the engine that `rollout.engine=auto` selects for a new run, and why it does.

    Args:
        planner: of the settings.
        backend: the device family.
        devices: number of devices.
        device: one of them.
    """
    if planner.config.rollout.engine != AUTO or planner.supervised:
        return planner, []
    config = deepcopy(planner.config)
    config.trainer = replace(config.trainer, resume="never")  # a checkpoint here is not of the planned run
    notes = resolve_engine(config, backend, devices, device)
    config.trainer = planner.config.trainer
    return planner.with_config(config), notes


def nearest_alternative(
    planner: Planner,
    backend: Backend,
    devices: int,
    of_a_host: int,
    room: float,
    *,
    separate: bool,
    here: RunDevice | None = None,
    used: str | None = None,
) -> str:
    """Return the nearest alternative that fits into `room` bytes of a device, each with the engine it would use.

    Args:
        planner: of settings that do not fit, as they are written.
        backend: the device family.
        devices: number of devices.
        of_a_host: number of them on a host.
        room: usable bytes of a device.
        separate: rollout runs on separate devices already.
        here: the device of this machine; None: one with such room, on whose host nothing is asked.
        used: the engine that does not fit; an alternative with another one names it. None: none is named.
    """
    config = planner.config

    def select(each: Planner, count: int) -> Planner:
        most = max(of_a_host, DEVICES_OF_A_HOST) if count > devices else of_a_host
        device = here or PlannedDevice(int(room), min(count, most), usable=1.0)
        return with_engine(each, backend, count, device)[0]

    divides = engine_kind(config.rollout).runs_vllm and shares_device(config.rollout) and not separate
    return planner.instead(
        config.trainer,
        backend,
        devices,
        room,
        is_separate=separate,
        sizes=rollout_sizes(config.model, of_a_host) if divides else (),
        select=select,
        used=used,
    )


def alternatives_with_engines(
    config: Config, written: RolloutConfig, backend: Backend, devices: int, device: RunDevice
) -> Callable[[Planner, float], str] | None:
    """Return a function that finds what would fit instead, with the engine that a run would select then.

    Args:
        config: settings whose engine is resolved.
        written: `rollout` before that.
        backend: the device family.
        devices: processes of the run.
        device: one of their devices.

    Returns:
        planner of settings that do not fit, usable bytes of a device -> the nearest alternative, as text. None: the
        engine is that of a checkpoint, which a run keeps.
    """
    if "engine" in saved_settings(config.trainer).get("rollout", {}):
        return None

    def find(planner: Planner, room: float) -> str:
        return nearest_alternative(
            planner.with_config(changed_settings(planner.config, {"rollout": written})),
            backend,
            devices,
            ranks_of_host(devices, device),
            room,
            separate=not (engine_kind(config.rollout).samples_with_policy or shares_device(config.rollout)),
            here=None if isinstance(device, PlannedDevice) else device,
            used=config.rollout.engine,
        )

    return find


def _plan_chip(planner: Planner, cluster: Cluster, chip: Chip, backend: Backend) -> ChipPlan:
    device, written = cluster.device(None if chip.memory is None else int(chip.memory)), planner
    notes: list[str] = []
    if not cluster.separate:
        planner, notes = with_engine(planner, backend, cluster.devices, device)
    config = planner.config
    work = planner.work(backend, cluster.devices, separate=cluster.separate)
    room = None if chip.memory is None else cluster.usable * chip.memory
    trainer = planner.resolve(config.trainer, backend, cluster.devices, room, separate=cluster.separate)
    sharding = sharding_of(trainer, cluster.devices)
    config = planner.with_sequences(trainer, backend, cluster.devices, room, separate=cluster.separate).config
    memory = estimate(config, planner.shape, work, sharding)
    samplers, share = 0, None
    if work.is_elsewhere:
        needed = planner.rollout_bytes(work, cluster.devices)
        samplers = cluster.samplers or (1 if room is None else math.ceil(needed / room))
    elif work.beside:
        beside = engine_room(changed_settings(config, {"trainer": trainer}), backend, cluster.devices, device)
        share = beside.share if beside is not None and beside.why_too_little is None else None
    instead = ""
    if room is not None and memory.peak > room:
        of_a_host = cluster.devices // cluster.nodes
        instead = nearest_alternative(written, backend, cluster.devices, of_a_host, room, separate=cluster.separate)
    return ChipPlan(
        name=chip.title,
        config=config,
        engine_notes=tuple(notes),
        engine_share=share,
        work=work,
        strategy=cluster.strategy or trainer.strategy,
        sharding=sharding,
        memory=memory,
        limit=chip.memory,
        fits=None if room is None else memory.peak <= room,
        seconds=step_seconds(
            config,
            planner.shape,
            planner.frozen,
            work,
            sharding,
            chip,
            cluster.rates,
            devices=cluster.devices,
            samplers=samplers,
        ),
        samplers=samplers,
        instead=instead,
    )
