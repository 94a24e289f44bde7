"""What `trainer.strategy=auto` means for a run: its checkpoint's strategy, else the simplest whose plan fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo_backends import Backend

from hwgrpo.catalog import STRATEGIES
from hwgrpo.config import Config
from hwgrpo.config.derived import sequences_at_once
from hwgrpo.config.schema import TrainerConfig
from hwgrpo.config.stored_settings import stored_tree
from hwgrpo.errors import CheckpointError, ConfigError
from hwgrpo.planning.planned_device import RunDevice, usable_share
from hwgrpo.planning.planned_sharding import changed_settings, replicated_strategy, resolve_auto, strategy_kind
from hwgrpo.rollout.engine_kind import engine_kind
from hwgrpo.rollout.shared_devices import shares_device
from hwgrpo.support.terminal_width import format_bytes
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.checkpoint import manifest as checkpoint_manifest

if TYPE_CHECKING:
    from hwgrpo.planning.planner import Planner


def resolve_strategy(
    config: Config,
    backend: Backend,
    world_size: int,
    device: RunDevice | None,
    *,
    supervised: bool = False,
    instead: Callable[[Planner, float], str] | None = None,
) -> list[str]:
    """Replace `trainer.strategy=auto`, and `auto` of the strategy's own settings, by values that checkpoints keep.

    Args:
        config: checked settings.
        backend: the device family.
        world_size: processes of the run.
        device: this process's device; None: it is not here.
        supervised: the run samples nothing.
        instead: planner of settings that do not fit, usable bytes of a device -> what would fit, from
            `alternatives_with_engines`; None: only what fits with the settings' engine.

    Returns:
        Notes for the user on the memory that it needs, where a device has its own.

    Raises:
        ConfigError: this number of processes cannot run the checkpoint's strategy.
    """
    trainer = _as_saved(config.trainer, world_size)
    total = device.memory().total if device is not None else None
    notes = []
    fastest = resolve_auto(trainer, world_size, lambda _: True)
    if total is None or trainer == fastest:
        trainer = fastest
    else:
        room = int(usable_share(device) * total)
        try:
            trainer, note = _by_plan(config, trainer, backend, world_size, room, supervised=supervised, instead=instead)
        except Exception as error:  # a model of unknown sizes may still train
            note = (
                f"warning: {_named(trainer, fastest)} (auto), whose memory cannot be estimated: "
                f"{type(error).__name__}: {error}"
            )
            trainer = fastest
        notes.append(note)
    config.trainer = trainer
    return notes


def resolve_sequences(config: Config, backend: Backend, world_size: int, device: RunDevice | None) -> list[str]:
    """Replace `rollout.max_sequences=null` of the local engine; call it after `resolve_strategy`.

    The number is the checkpoint's, else the largest with which generation fits by the plan: how many rows are decoded
    at once can change a product's rounding, so that it does not depend on the memory that is free at a start.

    Args:
        config: checked settings; `trainer.strategy` is resolved.
        backend: the device family.
        world_size: processes of the run.
        device: this process's device; None: it is not here.

    Returns:
        Notes for the user, where the device has its own memory.
    """
    r = config.rollout
    if r.max_sequences is not None or not engine_kind(r).samples_with_policy:
        return []
    saved = saved_settings(config.trainer).get("rollout", {}).get("max_sequences")
    if saved is not None:
        r.max_sequences = saved
        return []
    total = device.memory().total if device is not None else None
    if total is None:
        r.max_sequences = sequences_at_once(r)
        return []
    from hwgrpo.planning.planner import Planner

    room = int(usable_share(device) * total)
    try:
        planner = Planner(config).with_sequences(config.trainer, backend, world_size, room, separate=False)
    except Exception as error:  # a model of unknown sizes may still train
        r.max_sequences = sequences_at_once(r)
        note = "whose memory cannot be estimated"
        return [f"warning: rollout.max_sequences={r.max_sequences} (null), {note}: {type(error).__name__}: {error}"]
    r.max_sequences = planner.config.rollout.max_sequences
    usable = f"the {format_bytes(room)} usable on a device"
    return [f"rollout.max_sequences={r.max_sequences} (null): as many as the plan has room for in {usable}"]


def _as_saved(trainer: TrainerConfig, world_size: int) -> TrainerConfig:
    """Return the settings with the checkpoint's values for those at `auto`."""
    saved = saved_settings(trainer).get("trainer", {})
    strategy = saved.get("strategy", "auto")
    if trainer.strategy == "auto" and strategy != "auto":
        if STRATEGIES.load(strategy).one_process != (world_size == 1):
            raise ConfigError(
                f"trainer.strategy=auto: the checkpoint is of a run with trainer.strategy={strategy}, which "
                f"{world_size} process{'es' * (world_size > 1)} cannot run; start it as it was started then, or set "
                f"trainer.strategy={replicated_strategy(world_size)} to change it"
            )
        trainer = dataclasses.replace(trainer, strategy=strategy)
    for key in strategy_kind(trainer, world_size).alternatives(trainer)[0]:
        section, _, name = key.partition(".")
        value = saved.get(section, {}).get(name, "auto")
        if value != "auto":
            trainer = changed_settings(trainer, {key: value})
    return trainer


def saved_settings(trainer: TrainerConfig) -> Mapping[str, Any]:
    """Return the settings of the run whose checkpoint `trainer.resume` selects; empty without one.

    Reads manifests only, since no process group exists yet: the checkpoint's files are verified later.
    """
    resume = trainer.resume
    if resume == "never":
        return {}
    folder = Path(trainer.output_dir) / "checkpoints"
    folders = [path for _, path in checkpoint_files.folders(folder)] if resume == "auto" else [Path(resume)]
    for each in reversed(folders):
        try:
            return stored_tree(checkpoint_manifest.read(each).content["state"]["config"])
        except CheckpointError:  # reported when the files are verified
            continue
    return {}


def _by_plan(
    config: Config,
    trainer: TrainerConfig,
    backend: Backend,
    devices: int,
    room: int,
    *,
    supervised: bool,
    instead: Callable[[Planner, float], str] | None,
) -> tuple[TrainerConfig, str]:
    """Return the settings whose plan fits into `room` bytes of a device, and a note."""
    from hwgrpo.planning.planner import Planner

    planner = Planner(config, supervised=supervised)
    separate = not (engine_kind(config.rollout).samples_with_policy or shares_device(config.rollout))

    def peak(settings: TrainerConfig) -> int:
        return planner.memory(backend, devices, settings, separate=separate).peak

    chosen = planner.resolve(trainer, backend, devices, room, separate=separate)
    fastest = resolve_auto(trainer, devices, lambda _: True)
    named, needed = _named(trainer, chosen), format_bytes(peak(chosen))
    usable = f"of the {format_bytes(room)} usable on a device"
    if peak(chosen) > room:
        if instead is None:
            text = planner.instead(trainer, backend, devices, room, is_separate=separate)
        else:
            text = instead(planner.with_config(changed_settings(config, {"trainer": trainer})), room)
        return chosen, (
            f"warning: {named} (auto) needs about {needed} {usable}; what would fit: {text}"
            " (`hwgrpo plan` shows the parts)"
        )
    more = "" if chosen == fastest else f"; {_named(trainer, fastest)} would need {format_bytes(peak(fastest))}"
    return chosen, f"{named} (auto): about {needed} {usable}{more}"


def _named(before: TrainerConfig, after: TrainerConfig) -> str:
    """Return the settings that have got a value."""
    old, new = _flat(dataclasses.asdict(before)), _flat(dataclasses.asdict(after))
    return ", ".join(f"trainer.{key}={value}" for key, value in new.items() if value != old[key])


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
