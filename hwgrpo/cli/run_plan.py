"""`--dry-run` of the training commands: print the plan of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from hwgrpo.cli.backend_selection import PlannedHost, planned_host
from hwgrpo.support.text import terminal_lines

if TYPE_CHECKING:
    from hwgrpo.config import Config
    from hwgrpo.planning.dry_run import Plan
    from hwgrpo.planning.planned_device import RunDevice
    from hwgrpo.training.supervised.supervised_setup import Training


def print_plan(config: Config, *, allow_finished: bool, chip: str | None = None) -> int:
    """Print the plan of a GRPO run; return 0 where this machine can run it now, else 1 with the reasons on stderr.

    Args:
        config: checked settings; `auto` values are replaced in place.
        allow_finished: a finished run of other settings or data is not an error.
        chip: the chip to plan for; None: the device here, or the first chip of the named backend.
    """
    host = planned_host(config, chip)
    from hwgrpo.planning.dry_run import make_plan
    from hwgrpo.planning.engine_choice import resolve_engine
    from hwgrpo.planning.engine_share import planned_engine_share
    from hwgrpo.planning.scale_plan import alternatives_with_engines
    from hwgrpo.planning.strategy_choice import resolve_sequences, resolve_strategy

    planned = config, host.backend, host.world_size, _run_device(host)
    written = config.rollout
    engine_notes = resolve_engine(*planned)
    notes = resolve_strategy(*planned, instead=alternatives_with_engines(config, written, *planned[1:]))
    engine_notes += resolve_sequences(*planned)
    plan = make_plan(
        config,
        host.backend,
        host.world_size,
        no_device=host.reason,
        chip=host.chip.title if host.chip is not None else None,
        allow_finished=allow_finished,
        strategy_notes=notes,
        rollout_notes=[*engine_notes, *planned_engine_share(*planned)[1]],
    )
    return _report(plan, host)


def print_supervised_plan(config: Config, parts: Callable[[], Training], *, chip: str | None = None) -> int:
    """Print the plan of a run on given examples; return what `print_plan` does.

    Args:
        config: from `supervised_settings`; `auto` values are replaced in place.
        parts: imports what differs between commands, once the device's environment variables are set.
        chip: the chip to plan for, as `print_plan` takes it.
    """
    host = planned_host(config, chip)
    from hwgrpo.planning.dry_run import make_supervised_plan
    from hwgrpo.planning.strategy_choice import resolve_strategy

    training = parts()
    training.check(config)
    notes = resolve_strategy(config, host.backend, host.world_size, _run_device(host), supervised=True)
    plan = make_supervised_plan(
        config,
        training,
        host.backend,
        host.world_size,
        no_device=host.reason,
        chip=host.chip.title if host.chip is not None else None,
        strategy_notes=notes,
    )
    return _report(plan, host)


def _run_device(host: PlannedHost) -> RunDevice:
    """Return the device here, or the one that stands for it."""
    from hwgrpo_backends.device import Device

    from hwgrpo.planning.planned_device import PlannedDevice

    if host.reason is None:
        return Device(host.backend)
    memory = None if host.chip is None or host.chip.memory is None else int(host.chip.memory)
    return PlannedDevice(memory, host.local_world_size)


def _report(plan: Plan, host: PlannedHost) -> int:
    """Print a plan on the first rank; return the exit code."""
    if host.rank == 0:
        print(plan.text)
        for problem in plan.problems:
            print(f"hwgrpo: not ready here: {terminal_lines(problem)}", file=sys.stderr)
    return 1 if plan.problems else 0
