"""`hwgrpo train RECIPE key=value ...`: train, or print the plan of a run."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from hwgrpo.text import hide_secrets, terminal_lines

if TYPE_CHECKING:
    from hwgrpo.config import Config

HELP = "train a language model with GRPO from a recipe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("recipe", help="recipe YAML, or the name of a shipped recipe (tiny_sort)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the recipe")
    parser.add_argument("--print-config", action="store_true", help="print every setting of the run and stop")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything that can be checked here, print the plan and stop"
    )
    parser.add_argument(
        "--allow-finished",
        action="store_true",
        help="exit with 0 where output_dir has a finished run of other settings or data (default: 2)",
    )


def run(args: argparse.Namespace) -> int:
    """Train; return the exit code."""
    from hwgrpo.config import load_config
    from hwgrpo.config.load import to_yaml
    from hwgrpo.config.validate import check_resume

    config = load_config(
        args.recipe,
        args.overrides,
        data_may_be_missing=args.dry_run,
        variables_may_be_missing=args.print_config,
    )
    check_resume(config)
    if args.print_config:
        print(to_yaml(config, shown=True), end="")
        return 0
    if args.dry_run:
        return _plan(config, allow_finished=args.allow_finished)

    from hwgrpo.cli.backend_selection import prepare_host

    host = prepare_host(config)
    from hwgrpo.errors import RunFinished
    from hwgrpo.training.finish import finish
    from hwgrpo.training.loop import train
    from hwgrpo.training.setup import build_run

    try:
        run = build_run(
            config, host.backend, host.local_rank, host.local_world_size, allow_finished=args.allow_finished
        )
    except RunFinished as finished:
        if host.rank == 0:
            print(hide_secrets(str(finished)))
        return 0
    try:
        finish(run, train(run))
    finally:
        run.close()
    # only after success: a failed rank would wait here for ranks that wait for it
    run.strategy.close()
    return 0


def _plan(config: Config, *, allow_finished: bool) -> int:
    """Print the plan; return 0 where this machine can run it now, else 1 with the reasons on stderr."""
    from hwgrpo.cli.backend_selection import planned_host

    host = planned_host(config)
    from hwgrpo.planning.dry_run import make_plan

    plan = make_plan(config, host.backend, host.world_size, no_device=host.reason, allow_finished=allow_finished)
    if host.rank == 0:
        print(plan.text)
        for problem in plan.problems:
            print(f"hwgrpo: not ready here: {terminal_lines(problem)}", file=sys.stderr)
    return 1 if plan.problems else 0
