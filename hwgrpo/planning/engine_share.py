"""What `rollout.gpu_memory_utilization=null` means: what the trainer leaves of its device."""

from __future__ import annotations

from dataclasses import replace

from hwgrpo_backends import Backend
from hwgrpo_backends.device import Device

from hwgrpo.config import Config
from hwgrpo.rollout.shared_devices import shares_device
from hwgrpo.terminal_width import format_bytes


def planned_engine_share(
    config: Config, backend: Backend, world_size: int, device: Device | None
) -> tuple[float | None, list[str]]:
    """Return the share of memory for an engine on the training devices; None where it is set, or nothing is shared.

    An engine that sleeps takes turns with the update: it gets what parameters and optimizer states leave.

    Args:
        config: checked settings; `trainer.strategy` is resolved.
        backend: the device family.
        world_size: processes of the run.
        device: this process's device; None: it is not here.

    Returns:
        The share, and notes for the user.
    """
    total = device.memory().total if device is not None else None
    if total is None or config.rollout.gpu_memory_utilization is not None or not shares_device(config):
        return None, []
    from hwgrpo.planning.memory import estimate
    from hwgrpo.planning.planned_sharding import config_sharding
    from hwgrpo.planning.scale_plan import USABLE, Planner

    try:
        planner = Planner(config)
        work = planner.work(backend, world_size, separate=False)
        sharding = config_sharding(config, world_size)
        together = estimate(config, planner.shape, work, sharding)
        alone = estimate(config, planner.shape, replace(work, beside=False), sharding)
    except Exception as error:  # a model of unknown sizes may still train
        return None, [f"warning: the engine's share of memory cannot be planned: {type(error).__name__}: {error}"]
    held = sum(alone.always.values()) if work.sleeps else alone.update_peak
    needed = sum(together.rollout.values()) if work.sleeps else together.update_peak - alone.update_peak
    share = int(100 * (USABLE - held / total)) / 100
    when = "between updates" if work.sleeps else "at the most"
    beside = f"beside {format_bytes(held)} of the trainer {when}, about, on a device of {format_bytes(total)}"
    if share * total < needed:
        return None, [
            f"warning: there is no room for {format_bytes(needed)} of the engine's weights and cache {beside}: use "
            "more devices with trainer.strategy=fsdp2, trainer.offload=optimizer, or rollout.engine=local"
        ]
    return share, [f"rollout.gpu_memory_utilization={share:g} (null): {beside}"]
