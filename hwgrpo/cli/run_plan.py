"""`hwgrpo train --dry-run`: print the plan of a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hwgrpo.text import terminal_lines

if TYPE_CHECKING:
    from hwgrpo.config import Config


def print_plan(config: Config, *, allow_finished: bool) -> int:
    """Print the plan; return 0 where this machine can run it now, else 1 with the reasons on stderr."""
    from hwgrpo.cli.backend_selection import planned_host

    host = planned_host(config)
    from hwgrpo_backends.device import Device

    from hwgrpo.planning.dry_run import make_plan
    from hwgrpo.planning.engine_choice import resolve_engine
    from hwgrpo.planning.engine_share import planned_engine_share
    from hwgrpo.planning.strategy_choice import resolve_strategy

    planned = config, host.backend, host.world_size, Device(host.backend) if host.reason is None else None
    engine_notes = resolve_engine(*planned)
    notes = resolve_strategy(*planned)
    plan = make_plan(
        config,
        host.backend,
        host.world_size,
        no_device=host.reason,
        allow_finished=allow_finished,
        strategy_notes=notes,
        rollout_notes=[*engine_notes, *planned_engine_share(*planned)[1]],
    )
    if host.rank == 0:
        print(plan.text)
        for problem in plan.problems:
            print(f"hwgrpo: not ready here: {terminal_lines(problem)}", file=sys.stderr)
    return 1 if plan.problems else 0
