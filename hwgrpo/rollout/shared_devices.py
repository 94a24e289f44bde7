"""Whether an engine shares the training devices, frees its memory there, and how much it gets. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from hwgrpo.config.schema import RolloutConfig
from hwgrpo.rollout.engine_kind import engine_kind
from hwgrpo.support.launched_ranks import local_world_size
from hwgrpo.support.terminal_width import format_bytes

LEAST_FREED = 0.5
"""Share of vLLM's memory that its sleep must free: on some ROCm systems it frees none (vLLM issue 37533)."""


def shares_device(rollout: RolloutConfig) -> bool:
    """Return whether vLLM computes on the training devices.

    That is in the training process, or in a server that the run starts without naming devices for it.
    """
    kind, server = engine_kind(rollout), rollout.server
    own_devices = server.url is not None or any(name.endswith("VISIBLE_DEVICES") for name in server.env)
    return kind.runs_vllm and not (kind.on_server and own_devices)


def server_devices(rollout: RolloutConfig, variable: str | None, environ: Mapping[str, str]) -> list[str]:
    """Return the training devices of each server that the run starts on its first host.

    Args:
        rollout: settings of the engine.
        variable: the backend's variable of visible devices; None: it has none.
        environ: variables of the first rank.

    Returns:
        Values of the variable; none where there is one server only, which sees what the run sees.
    """
    ranks, size = local_world_size(1, environ), rollout.tensor_parallel_size
    if variable is None or variable in rollout.server.env or not shares_device(rollout):
        return []
    visible = visible_devices(variable, environ, ranks)
    count = min(len(visible), ranks) // size
    return [",".join(visible[size * k : size * (k + 1)]) for k in range(count)] if count > 1 else []


def visible_devices(variable: str, environ: Mapping[str, str], count: int) -> list[str]:
    """Return the devices that a process sees, as a backend's variable names them; the first `count` if it is unset."""
    return environ[variable].split(",") if environ.get(variable) else [str(index) for index in range(count)]


def split_arguments(variable: str, devices: int) -> str:
    """Return arguments of `hwgrpo launch` by which half of a host's devices train and the others sample."""
    first, rest = (",".join(map(str, each)) for each in (range(devices // 2), range(devices // 2, devices)))
    return f"--visible {first} 'rollout.server.env={{{variable}: \"{rest}\"}}'"


def sleeps(rollout: RolloutConfig, *, on_host: bool) -> bool:
    """Return whether the engine frees its memory while the policy is trained.

    Args:
        rollout: settings of the engine.
        on_host: whether the run trains on a CPU.
    """
    on_demand = rollout.source in ("auto", "on_demand") and not rollout.max_staleness
    by_default = rollout.sleep_mode == "auto" and shares_device(rollout) and not on_host and on_demand
    return rollout.sleep_mode == "always" or by_default


def measured_sleep(free: int, awake: int, asleep: int) -> tuple[bool, str]:
    """Return whether an engine's first sleep has freed enough to sleep again, and a note.

    Args:
        free: bytes that were free on the device before the engine started.
        awake: the same with the engine awake.
        asleep: the same while it sleeps.
    """
    freed, held = asleep - awake, free - awake
    measured = f"its sleep frees {format_bytes(freed)} of the {format_bytes(held)} that it takes"
    if freed >= LEAST_FREED * held:
        return True, measured
    return False, (
        f"warning: {measured}, so it stays awake during updates: set rollout.sleep_mode=never, which plans memory "
        "for that"
    )


def memory_share(rollout: RolloutConfig) -> float:
    """Return the share of a device's memory for the engine, where the plan has not chosen one."""
    share = rollout.gpu_memory_utilization
    own_devices = engine_kind(rollout).runs_vllm and not shares_device(rollout)
    return share if share is not None else 0.9 if own_devices else 0.5
