"""What `rollout.engine=auto` means for a run: its checkpoint's engine, else the backend's first that can be used."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence

from hwgrpo_backends import Backend
from hwgrpo_backends.decide import AUTO
from hwgrpo_backends.device import Device

from hwgrpo.config import Config
from hwgrpo.config.rollout_rules import check_rollout
from hwgrpo.config.uses import default_of, unused_settings
from hwgrpo.config.validate import check_strategy, check_world_size
from hwgrpo.errors import ConfigError
from hwgrpo.planning.engine_share import engine_room
from hwgrpo.planning.model_shape import planned_settings
from hwgrpo.planning.strategy_choice import resolve_strategy, saved_settings
from hwgrpo.rollout.engine_kind import check_engine, engine_kind
from hwgrpo.rollout.shared_devices import shares_device, sleeps
from hwgrpo.rollout.vllm.engine import check_build
from hwgrpo.rollout.vllm.vllm_settings import check_head_size, check_sleep


def resolve_engine(config: Config, backend: Backend, world_size: int, device: Device | None) -> list[str]:
    """Replace `rollout.engine=auto` by a value that checkpoints keep; call it before `resolve_strategy`.

    Of the engines that the backend prefers, in its order, it is the first that supports the settings and the model,
    that this machine has, and for which the plan finds room. The last one needs no more than the trainer does.

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
    saved = saved_settings(config).get("rollout", {})
    if saved.get("engine", AUTO) != AUTO:
        size = config.rollout.tensor_parallel_size
        chosen = _with_engine(config, saved["engine"], saved.get("tensor_parallel_size", 1) if size == 1 else size)
        if device is not None:
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


def _choose(config: Config, backend: Backend, world_size: int, device: Device | None) -> tuple[Config, list[str]]:
    """Return the settings with the first engine that can be used, and notes: its place, and why not an earlier one."""
    names = ("vllm_server",) if config.rollout.server.url is not None else backend.rollout
    reasons: dict[str, str] = {}
    chosen = _with_engine(config, names[-1])
    for name, size in _options(config, names[:-1], world_size):
        option = _with_engine(config, name, size)
        unused = sorted(unused_settings(option) - unused_settings(config))
        if unused:
            reason = f"{', '.join(unused)} would have no effect"
        else:
            reason = _why_not(option, backend, world_size, device)
        if reason is None:
            chosen = option
            reasons.pop(name, None)
            break
        reasons.setdefault(name, reason.removeprefix(f"rollout.engine={name!r}: "))
    r, size = chosen.rollout, chosen.rollout.tensor_parallel_size
    parallel = f" with rollout.tensor_parallel_size={size}" if size != config.rollout.tensor_parallel_size else ""
    first = f"rollout.engine={r.engine} (auto){parallel}{_place(chosen, backend)}"
    return chosen, [first, *(f"not {other}: {reason}" for other, reason in reasons.items())]


def _options(config: Config, names: Sequence[str], world_size: int) -> Iterator[tuple[str, int]]:
    """Yield engines, each with numbers of devices over which to divide its weights."""
    ranks = _ranks_here(world_size)
    text = planned_settings(config.model)[0].get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    for name in names:
        yield name, config.rollout.tensor_parallel_size
        if config.rollout.tensor_parallel_size == 1 and config.rollout.server.url is None:
            for size in range(2, ranks + 1):
                # vLLM divides key-value heads over devices, or replicates each on as many (models/qwen2.py)
                if ranks % size == 0 and heads % size == 0 and 0 in (kv_heads % size, size % kv_heads):
                    yield name, size


def _ranks_here(world_size: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)


def _with_engine(config: Config, name: str, tensor_parallel_size: int | None = None) -> Config:
    """Return a copy with another engine, which shares the other sections."""
    size = config.rollout.tensor_parallel_size if tensor_parallel_size is None else tensor_parallel_size
    other = copy.copy(config)
    other.rollout = dataclasses.replace(config.rollout, engine=name, tensor_parallel_size=size)
    return other


def _why_not(config: Config, backend: Backend, world_size: int, device: Device | None) -> str | None:
    """Return why the engine of the settings cannot be used; None if it can."""
    on_host, (settings, _) = backend.is_host, planned_settings(config.model)
    checks: tuple[Callable[[], object], ...] = (
        *_checks_of_settings(config, world_size),
        lambda: check_engine(config),
        lambda: check_build(config, on_host=on_host) if config.rollout.engine == "vllm" else None,
        lambda: check_head_size(config, settings, on_host=on_host),
        lambda: check_sleep(config, settings, backend),
    )
    for check in checks:
        try:
            check()
        except ConfigError as error:
            return str(error)
    if engine_kind(config).on_server and shares_device(config) and world_size > _ranks_here(world_size):
        return (
            "servers that the run starts share the training devices of the first host, and there are several: start "
            "servers of your own (rollout.server.url)"
        )
    return _why_no_room(config, backend, world_size, device)


def _why_no_room(config: Config, backend: Backend, world_size: int, device: Device | None) -> str | None:
    try:
        resolve_strategy(config, backend, world_size, device)
        room = engine_room(config, backend, world_size, device)
    except Exception:  # a model of unknown sizes may still be sampled from
        return None
    return None if room is None else room.why_too_little


def _place(config: Config, backend: Backend) -> str:
    """Return where the engine computes, as the end of a note."""
    if engine_kind(config).samples_with_policy:
        return ""
    if not shares_device(config):
        return ", on devices of its own"
    asleep = sleeps(config, on_host=backend.is_host)
    return f", on the training devices, where it {'sleeps' if asleep else 'stays awake'} during updates"


def _reset(config: Config, key: str) -> None:
    """Set a setting to its default."""
    section: object = config
    *sections, last = key.split(".")
    for name in sections:
        section = getattr(section, name)
    assert dataclasses.is_dataclass(section)
    setattr(section, last, next(default_of(field) for field in dataclasses.fields(section) if field.name == last))
