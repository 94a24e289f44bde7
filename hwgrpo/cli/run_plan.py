"""`hwgrpo train --dry-run`: print the plan of a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hwgrpo.text import terminal_lines

if TYPE_CHECKING:
    from hwgrpo.config import Config


def print_plan(config: Config, *, allow_finished: bool, chip: str | None = None) -> int:
    """Print the plan; return 0 where this machine can run it now, else 1 with the reasons on stderr.

    Args:
        config: checked settings; `auto` values are replaced in place.
        allow_finished: a finished run of other settings or data is not an error.
        chip: the chip to plan for; None: the device here, or the first chip of the named backend.
    """
    from hwgrpo.cli.backend_selection import planned_host

    host = planned_host(config, chip)
    from hwgrpo_backends.device import Device

    from hwgrpo.planning.dry_run import make_plan
    from hwgrpo.planning.engine_choice import resolve_engine
    from hwgrpo.planning.engine_share import planned_engine_share
    from hwgrpo.planning.planned_device import PlannedDevice
    from hwgrpo.planning.strategy_choice import resolve_strategy

    memory = None if host.chip is None or host.chip.memory is None else int(host.chip.memory)
    absent = PlannedDevice(memory, host.local_world_size)
    planned = config, host.backend, host.world_size, Device(host.backend) if host.reason is None else absent
    engine_notes = resolve_engine(*planned)
    notes = resolve_strategy(*planned)
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
    if host.rank == 0:
        print(plan.text)
        for problem in plan.problems:
            print(f"hwgrpo: not ready here: {terminal_lines(problem)}", file=sys.stderr)
    return 1 if plan.problems else 0
