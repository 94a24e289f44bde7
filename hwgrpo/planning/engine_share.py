"""What `rollout.gpu_memory_utilization=null` means: what the trainer leaves of its device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hwgrpo_backends import Backend

from hwgrpo.config import Config
from hwgrpo.planning.planned_device import RunDevice, usable_share
from hwgrpo.rollout.shared_devices import memory_share, shares_device
from hwgrpo.support.terminal_width import format_bytes

NO_ROOM = "there is no room for"
"""Beginning of the reason why an engine does not fit beside the trainer."""


@dataclass(frozen=True)
class EngineRoom:
    """What the trainer leaves of a device to an engine there, in bytes."""

    total: int
    """Memory of the device."""
    usable: float
    """Share of it that a run may use."""
    held: int
    """The trainer's while the engine generates."""
    needed: int
    """The engine's weights and cache."""
    sleeps: bool
    """The engine frees its memory during updates."""

    @property
    def share(self) -> float:
        """Share of the device for the engine, in hundredths."""
        return int(100 * (self.usable - self.held / self.total)) / 100

    @property
    def text(self) -> str:
        """What the engine is beside."""
        when = "between updates" if self.sleeps else "at the most"
        return (
            f"beside {format_bytes(self.held)} of the trainer {when}, about, on a device of {format_bytes(self.total)}"
        )

    @property
    def why_too_little(self) -> str | None:
        """The reason if the share holds neither weights nor cache, else None."""
        if self.share * self.total >= self.needed:
            return None
        return f"{NO_ROOM} {format_bytes(self.needed)} of the engine's weights and cache {self.text}"


def engine_room(config: Config, backend: Backend, world_size: int, device: RunDevice | None) -> EngineRoom | None:
    """Return the room for an engine on the training devices, by the plan; None where it is set, or nothing is shared.

    An engine that sleeps takes turns with the update: it gets what parameters and optimizer states leave.

    Args:
        config: checked settings; `trainer.strategy` is resolved.
        backend: the device family.
        world_size: processes of the run.
        device: this process's device; None: it is not here.
    """
    total = device.memory().total if device is not None else None
    if total is None or config.rollout.gpu_memory_utilization is not None or not shares_device(config.rollout):
        return None
    from hwgrpo.planning.memory import estimate
    from hwgrpo.planning.planned_sharding import sharding_of
    from hwgrpo.planning.planner import Planner

    planner = Planner(config)
    work = planner.work(backend, world_size, separate=False)
    sharding = sharding_of(config.trainer, world_size)
    together = estimate(config, planner.shape, work, sharding)
    alone = estimate(config, planner.shape, replace(work, beside=False), sharding)
    return EngineRoom(
        total,
        usable_share(device),
        held=sum(alone.always.values()) if work.sleeps else max(alone.update_peak, alone.rewards_peak),
        needed=sum(together.rollout.values()) if work.sleeps else together.update_peak - alone.update_peak,
        sleeps=work.sleeps,
    )


def why_too_little_elsewhere(config: Config, backend: Backend, world_size: int, device: RunDevice) -> str | None:
    """Return why an engine does not fit on devices of its own, which are like the trainer's; None where it does.

    Args:
        config: checked settings of an engine that shares no device; `trainer.strategy` is resolved.
        backend: the device family.
        world_size: processes of the run.
        device: this process's device.
    """
    total = device.memory().total
    if total is None:
        return None
    from hwgrpo.planning.memory import estimate
    from hwgrpo.planning.planned_sharding import sharding_of
    from hwgrpo.planning.planner import Planner

    planner = Planner(config)
    work = replace(planner.work(backend, world_size, separate=True), beside=True, sleeps=True)
    needed = sum(estimate(config, planner.shape, work, sharding_of(config.trainer, world_size)).rollout.values())
    if needed <= memory_share(config.rollout) * total:
        return None
    size = config.rollout.tensor_parallel_size
    return f"each of {size} idle devices of {format_bytes(total)} would need {format_bytes(needed)}"


def planned_engine_share(
    config: Config, backend: Backend, world_size: int, device: RunDevice | None
) -> tuple[float | None, list[str]]:
    """Return the share of memory for an engine on the training devices; None where it is set, or nothing is shared.

    Args:
        config: checked settings; `trainer.strategy` is resolved.
        backend: the device family.
        world_size: processes of the run.
        device: this process's device; None: it is not here.

    Returns:
        The share, and notes for the user.
    """
    try:
        room = engine_room(config, backend, world_size, device)
    except Exception as error:  # a model of unknown sizes may still train
        return None, [f"warning: the engine's share of memory cannot be planned: {type(error).__name__}: {error}"]
    if room is None:
        return None, []
    if room.why_too_little is not None:
        return None, [
            f"warning: {room.why_too_little}: use more devices with trainer.strategy=fsdp2, trainer.offload=optimizer, "
            "or rollout.engine=local"
        ]
    return room.share, [f"rollout.gpu_memory_utilization={room.share:g} (null): {room.text}"]
