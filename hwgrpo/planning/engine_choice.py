"""What `rollout.engine=auto` means for a run: its checkpoint's engine, else the backend's first that can be used."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence

from hwgrpo_backends import Backend
from hwgrpo_backends.decide import AUTO

from hwgrpo.config import Config
from hwgrpo.config.load import is_given
from hwgrpo.config.rollout_rules import check_rollout
from hwgrpo.config.schema import ModelConfig, RolloutConfig
from hwgrpo.config.uses import default_of, unused_settings
from hwgrpo.config.validate import check_strategy, check_world_size
from hwgrpo.errors import ConfigError
from hwgrpo.models.layer_values import layer_values
from hwgrpo.planning.engine_share import NO_ROOM, engine_room, why_too_little_elsewhere
from hwgrpo.planning.model_shape import planned_settings
from hwgrpo.planning.planned_device import PlannedDevice, RunDevice, ranks_of_host
from hwgrpo.planning.strategy_choice import resolve_strategy, saved_settings
from hwgrpo.rollout.engine_kind import ask_environment, check_engine, engine_kind
from hwgrpo.rollout.shared_devices import shares_device, sleeps, split_arguments, visible_devices
from hwgrpo.rollout.vllm.vllm_settings import check_head_size, check_images, check_sleep
from hwgrpo.training.vision_checks import check_engine_reads_images


def resolve_engine(config: Config, backend: Backend, world_size: int, device: RunDevice | None) -> list[str]:
    """Replace `rollout.engine=auto` by a value that checkpoints keep; call it before `resolve_strategy`.

    Of the engines that the backend prefers, in its order, it is the first that supports the settings and the model,
    that this machine has, and for which the plan finds room on the training devices; else a server on devices that no
    rank uses, if there are some. The last one needs no more than the trainer does. For a `PlannedDevice` nothing is
    asked of this machine, and no device is idle.

    Args:
        config: checked settings.
        backend: the device family.
        world_size: processes of the run.
        device: this process's device; None: it is not here.

    Returns:
        Notes for the user: the engine, its place, and why not an earlier one.

    Raises:
        ConfigError: the model cannot be found or read, the engine does not support the settings, or it is the
            checkpoint's and cannot be used here.
    """
    if config.rollout.engine != AUTO:
        return []
    already_unused = unused_settings(config)  # a recipe's settings that are without effect beside its overrides
    saved = saved_settings(config.trainer).get("rollout", {})
    if saved.get("engine", AUTO) != AUTO:
        r = config.rollout
        size = r.tensor_parallel_size if _has_size(config) else saved.get("tensor_parallel_size", 1)
        chosen = _with_engine(config, saved["engine"], size)
        if backend.visible_env in saved.get("server", {}).get("env", {}):  # of other devices, perhaps
            chosen = next(_on_idle_devices(config, backend, world_size, device, [size]), chosen)
        if device is not None and not isinstance(device, PlannedDevice):
            _check_saved(chosen, world_size)
        notes = [f"rollout.engine={saved['engine']} (auto): the engine of the checkpoint's run"]
    else:
        chosen, notes = _choose(config, backend, world_size, device)
    config.rollout = chosen.rollout
    if unused := sorted(unused_settings(config) - already_unused):
        for key in unused:
            _reset(config, key)
        notes.append(f"without effect with rollout.engine={config.rollout.engine}, and left out: {', '.join(unused)}")
    for check in _checks_of_settings(config, world_size):
        check()
    return notes


def _checks_of_settings(config: Config, world_size: int) -> tuple[Callable[[], object], ...]:
    """Return the checks of settings that depend on the engine, which `load_config` ran with `auto`."""
    return (
        lambda: check_strategy(config),
        lambda: check_world_size(config, world_size),
        lambda: check_rollout(config),
    )


def _check_saved(config: Config, world_size: int) -> None:
    """Check that the checkpoint's engine can be used here.

    Raises:
        ConfigError: it cannot; the message names the checkpoint as the source of the engine.
    """
    r = config.rollout
    try:
        for check in (*_checks_of_settings(config, world_size), lambda: check_engine(config)):
            check()
    except ConfigError as error:
        raise ConfigError(
            f"rollout.engine=auto: the checkpoint is of a run with rollout.engine={r.engine}, "
            f"rollout.tensor_parallel_size={r.tensor_parallel_size}, which cannot be used here: {error}. To change the "
            "engine set rollout.engine, e.g. to local"
        ) from error


def _choose(config: Config, backend: Backend, world_size: int, device: RunDevice | None) -> tuple[Config, list[str]]:
    """Return the settings with the first engine that can be used, and notes: its place, and why not an earlier one."""
    names = ("vllm_server",) if config.rollout.server.url is not None else backend.rollout
    reasons: dict[str, str] = {}
    chosen, said = _with_engine(config, names[-1]), ""
    options = itertools.chain(
        (_with_engine(config, *option) for option in _options(config, names[:-1], ranks_of_host(world_size, device))),
        _on_idle_devices(config, backend, world_size, device) if "vllm_server" in names[:-1] else (),
    )
    for option in options:
        unused = sorted(unused_settings(option) - unused_settings(config))
        if unused:
            reason = f"{', '.join(unused)} would have no effect"
        else:
            reason = _why_not(option, backend, world_size, device)
        if reason is None:
            chosen, said = option, _ask(option, backend, device)
            break
        name = option.rollout.engine
        name += "" if option.rollout.server.env == config.rollout.server.env else " on devices of its own"
        reason = reason.removeprefix(f"rollout.engine={option.rollout.engine!r}: ")
        if reason not in reasons.values():
            reasons.setdefault(name, reason)
    r, size = chosen.rollout, chosen.rollout.tensor_parallel_size
    not_shared = reasons.pop(r.engine, None)
    parallel = f" with rollout.tensor_parallel_size={size}" if size != config.rollout.tensor_parallel_size else ""
    planned = isinstance(device, PlannedDevice) and r.engine != names[-1] and r.server.url is None
    auto = "auto; planned for this device, where vLLM must be installed" if planned else "auto"
    first = f"rollout.engine={r.engine} ({auto}){parallel}{_place(r, backend, device)}"
    if r.server.env != config.rollout.server.env:
        first += f", which no rank uses; not shared: {not_shared}"
    notes = [
        first,
        *([f"asked: {said}"] if said else []),
        *(f"not {other}: {reason}" for other, reason in reasons.items()),
    ]
    devices, variable = ranks_of_host(world_size, device), backend.visible_env
    if r.engine == names[-1] and devices > 1 and variable and NO_ROOM in reasons.get("vllm_server", ""):
        notes.append(f"to split the devices of this host: hwgrpo launch --run {split_arguments(variable, devices)}")
    return chosen, notes


def _options(config: Config, names: Sequence[str], ranks: int) -> Iterator[tuple[str, int]]:
    """Yield engines, each with numbers of devices, of a host with `ranks`, over which to divide its weights."""
    for name in names:
        if _has_size(config) or config.rollout.server.url is not None:
            yield name, config.rollout.tensor_parallel_size
        else:
            yield from ((name, size) for size in rollout_sizes(config.model, ranks))


def _on_idle_devices(
    config: Config,
    backend: Backend,
    world_size: int,
    device: RunDevice | None,
    sizes: Sequence[int] | None = None,
) -> Iterator[Config]:
    """Yield settings of a server on devices that this process sees and no rank of this host uses, with the most first.

    Args:
        config: checked settings.
        backend: the device family.
        world_size: processes of the run.
        device: this process's device; None: it is not here.
        sizes: numbers of devices; None: the one that is set, or all over which vLLM can divide the model.
    """
    server, variable = config.rollout.server, backend.visible_env
    if (
        device is None
        or isinstance(device, PlannedDevice)
        or variable is None
        or server.url is not None
        or variable in server.env
    ):
        return
    idle = visible_devices(variable, os.environ, device.count)[ranks_of_host(world_size, device) :]
    if sizes is None:
        sizes = (
            [config.rollout.tensor_parallel_size]
            if _has_size(config)
            else _head_divisors(config.model, len(idle))[::-1]
        )
    for size in sizes:
        if size <= len(idle):
            option = _with_engine(config, "vllm_server", size)
            env = server.env | {variable: ",".join(idle[:size])}
            option.rollout.server = dataclasses.replace(server, env=env)
            yield option


def rollout_sizes(model: ModelConfig, ranks: int) -> list[int]:
    """Return the tensor-parallel sizes, in ascending order, of engines that share the devices of `ranks` on a host."""
    return [size for size in _head_divisors(model, ranks) if ranks % size == 0]


def _head_divisors(model: ModelConfig, most: int) -> list[int]:
    """Return the numbers of devices, in ascending order, over which vLLM can divide the model."""
    text = planned_settings(model)[0].get_text_config()
    counts = zip(layer_values(text, "num_attention_heads"), layer_values(text, "num_key_value_heads"), strict=True)
    layers = {(heads or 1, kv_heads or heads or 1) for heads, kv_heads in counts}
    # vLLM divides key-value heads over devices, or replicates each on as many (models/qwen2.py)
    return [
        n
        for n in range(1, most + 1)
        if n == 1 or all(heads % n == 0 and 0 in (kv_heads % n, n % kv_heads) for heads, kv_heads in layers)
    ]


def _has_size(config: Config) -> bool:
    """Return whether the user has set over how many devices to divide the weights."""
    return config.rollout.tensor_parallel_size > 1 or is_given(config, "rollout.tensor_parallel_size")


def _with_engine(config: Config, name: str, tensor_parallel_size: int | None = None) -> Config:
    """Return a copy with another engine, which shares the other sections."""
    size = config.rollout.tensor_parallel_size if tensor_parallel_size is None else tensor_parallel_size
    other = copy.copy(config)
    other.rollout = dataclasses.replace(config.rollout, engine=name, tensor_parallel_size=size)
    return other


def _why_not(config: Config, backend: Backend, world_size: int, device: RunDevice | None) -> str | None:
    """Return why the engine of the settings cannot be used; None if it can."""
    on_host, (settings, _) = backend.is_host, planned_settings(config.model)
    checks: tuple[Callable[[], object], ...] = (
        *_checks_of_settings(config, world_size),
        lambda: check_engine_reads_images(config, settings),
        *(() if isinstance(device, PlannedDevice) else (lambda: check_engine(config),)),
        lambda: check_head_size(config.rollout, config.model.path, settings, on_host=on_host),
        lambda: check_sleep(config.rollout, config.model.path, settings, backend),
        lambda: check_images(config.rollout, config.model.path, settings, backend),
    )
    for check in checks:
        try:
            check()
        except ConfigError as error:
            return str(error)
    several_hosts = world_size > ranks_of_host(world_size, device)
    if several_hosts and engine_kind(config.rollout).on_server and shares_device(config.rollout):
        return (
            "servers that the run starts share the training devices of the first host, and there are several: start "
            "servers of your own (rollout.server.url)"
        )
    if no_room := _why_no_room(config, backend, world_size, device):
        return no_room
    try:
        _ask(config, backend, device)  # last: it takes the time of an import
    except ConfigError as error:
        return str(error)
    return None


def _ask(config: Config, backend: Backend, device: RunDevice | None) -> str:
    """Return what the engine's environment says of itself; empty where the run's devices are not here to be seen."""
    return "" if device is None or isinstance(device, PlannedDevice) else ask_environment(config, backend)


def _why_no_room(config: Config, backend: Backend, world_size: int, device: RunDevice | None) -> str | None:
    try:
        resolve_strategy(config, backend, world_size, device)
        if device is not None and not shares_device(config.rollout) and config.rollout.server.url is None:
            return why_too_little_elsewhere(config, backend, world_size, device)
        room = engine_room(config, backend, world_size, device)
    except Exception:  # a model of unknown sizes may still be sampled from
        return None
    return None if room is None else room.why_too_little


def _place(rollout: RolloutConfig, backend: Backend, device: RunDevice | None) -> str:
    """Return whether the engine shares the training devices, and why, as the end of a note."""
    if engine_kind(rollout).samples_with_policy:
        return ""
    server = rollout.server
    if not shares_device(rollout):
        devices = "" if server.url else f" {server.env.get(backend.visible_env or '', '')}".rstrip()
        source = "rollout.server.url" if server.url else "rollout.server.env"
        return f", split: on devices{devices} of its own ({source})"
    asleep = sleeps(rollout, on_host=backend.is_host)
    is_planned = rollout.gpu_memory_utilization is None and device is not None and device.memory().total
    reason = f"both fit {'in turn' if asleep else 'at once'}" if is_planned else "the default"
    return (
        f", shared: on the training devices, where it {'sleeps' if asleep else 'stays awake'} during updates ({reason})"
    )


def _reset(config: Config, key: str) -> None:
    """Set a setting to its default."""
    section: object = config
    *sections, last = key.split(".")
    for name in sections:
        section = getattr(section, name)
    assert dataclasses.is_dataclass(section)
    setattr(section, last, next(default_of(field) for field in dataclasses.fields(section) if field.name == last))
