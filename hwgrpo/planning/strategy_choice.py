"""What `trainer.strategy=auto` means for a run: its checkpoint's strategy, else the simplest whose plan fits."""

from __future__ import annotations

from pathlib import Path

from hwgrpo_backends import Backend
from hwgrpo_backends.device import Device

from hwgrpo.catalog import STRATEGIES
from hwgrpo.config import Config
from hwgrpo.config.load import stored_tree
from hwgrpo.errors import CheckpointError, ConfigError
from hwgrpo.planning.planned_sharding import config_sharding, replicated_strategy
from hwgrpo.planning.scale_plan import USABLE, Planner
from hwgrpo.rollout.engine_kind import engine_kind
from hwgrpo.terminal_width import format_bytes
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.checkpoint import manifest as checkpoint_manifest


def resolve_strategy(config: Config, backend: Backend, world_size: int, device: Device | None) -> list[str]:
    """Replace `trainer.strategy=auto` in a run's settings, which its checkpoints keep.

    Args:
        config: checked settings.
        backend: the device family.
        world_size: processes of the run.
        device: this process's device; None: it is not here, or has no memory of its own.

    Returns:
        Notes for the user on the memory that it needs, where a device has its own.

    Raises:
        ConfigError: this number of processes cannot run the checkpoint's strategy.
    """
    if config.trainer.strategy != "auto":
        return []
    saved = _saved_strategy(config)
    if saved is not None:
        _check_processes(saved, world_size)
        config.trainer.strategy = saved
        return []
    total = device.memory().total if device is not None else None
    if total is None:
        config.trainer.strategy = replicated_strategy(world_size)
        return []
    return [_choose_by_plan(config, backend, world_size, int(USABLE * total))]


def _saved_strategy(config: Config) -> str | None:
    """Return the strategy of the run whose checkpoint `trainer.resume` selects; None without one.

    Reads manifests only, since no process group exists yet: the checkpoint's files are verified later.
    """
    resume = config.trainer.resume
    if resume == "never":
        return None
    folder = Path(config.trainer.output_dir) / "checkpoints"
    folders = [path for _, path in checkpoint_files.folders(folder)] if resume == "auto" else [Path(resume)]
    for each in reversed(folders):
        try:
            settings = stored_tree(checkpoint_manifest.read(each).content["state"]["config"])
        except CheckpointError:  # reported when the files are verified
            continue
        saved = settings.get("trainer", {}).get("strategy", "auto")
        return None if saved == "auto" else saved
    return None


def _check_processes(saved: str, world_size: int) -> None:
    if STRATEGIES.load(saved).one_process != (world_size == 1):
        raise ConfigError(
            f"trainer.strategy=auto: the checkpoint is of a run with trainer.strategy={saved}, which "
            f"{world_size} process{'es' * (world_size > 1)} cannot run; start it as it was started then, or set "
            f"trainer.strategy={replicated_strategy(world_size)} to change it"
        )


def _choose_by_plan(config: Config, backend: Backend, devices: int, room: int) -> str:
    planner = Planner(config)
    apart = not engine_kind(config).samples_with_policy
    name = planner.auto_strategy(backend, devices, room, apart=apart)
    peak = planner.memory(backend, devices, config_sharding(config, devices, name), apart=apart).peak
    replicated = planner.memory(backend, devices, config_sharding(config, devices), apart=apart).peak
    config.trainer.strategy = name
    usable = f"of the {format_bytes(room)} usable on a device"
    if peak > room:
        return (
            f"warning: trainer.strategy={name} needs about {format_bytes(peak)} {usable}; what would fit: "
            f"{planner.instead(backend, devices, room, is_apart=apart)} (`hwgrpo plan` shows the parts)"
        )
    reason = "" if peak == replicated else f"; ddp would need {format_bytes(replicated)}"
    return f"trainer.strategy=auto is {name}: about {format_bytes(peak)} {usable}{reason}"
