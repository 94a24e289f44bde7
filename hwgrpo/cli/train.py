"""`hwgrpo train RECIPE key=value ...`: train, or print the plan of a run."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from hwgrpo.cli.import_settings import add_import_options, import_options, use_imported
from hwgrpo.errors import ConfigError
from hwgrpo.support.launched_ranks import launched_rank, launcher_variables

HELP = "train a language model with GRPO from a recipe"
CHIP_HELP = "with --dry-run: plan for this chip, as `hwgrpo plan --chip` names it, whatever devices are here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("recipe", help="recipe YAML, or the name of a shipped recipe (tiny_sort)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the recipe")
    add_flags(parser)
    add_plan_options(parser)
    add_import_options(parser)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the options, which other training commands and `hwgrpo launch` have too."""
    parser.add_argument("--print-config", action="store_true", help="print every setting of the run and stop")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything that can be checked here, print the plan and stop"
    )
    parser.add_argument(
        "--allow-finished",
        action="store_true",
        help="exit with 0 where output_dir has a finished run of other settings or data (default: 2)",
    )


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a dry run, which other training commands have too."""
    parser.add_argument(
        "--devices", type=int, metavar="N", help="with --dry-run: plan N devices, one process each (default 1)"
    )
    parser.add_argument("--chip", metavar="NAME", help=CHIP_HELP)


def run(args: argparse.Namespace) -> int:
    """Train; return the exit code."""
    from hwgrpo.config import load_config
    from hwgrpo.config.load import to_yaml
    from hwgrpo.config.validate import check_resume

    plan_devices(args)
    _name_other_processes(args)
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
        from hwgrpo.cli.run_plan import print_plan

        return print_plan(config, allow_finished=args.allow_finished, chip=args.chip)

    from hwgrpo.cli.backend_selection import prepare_host
    from hwgrpo.cli.run_start import print_finished, start_run

    host = prepare_host(config)
    from hwgrpo.errors import RunFinished
    from hwgrpo.training.finish import finish
    from hwgrpo.training.loop import train

    try:
        run = start_run(config, host, allow_finished=args.allow_finished)
    except RunFinished as finished:
        if host.rank == 0:
            print_finished(finished)
        return 0
    try:
        finish(run, train(run))
    finally:
        run.close()
    # only after success: a failed rank would wait here for ranks that wait for it
    run.strategy.close()
    return 0


def _name_other_processes(args: argparse.Namespace) -> None:
    """Use imported settings, and say where their script starts more processes than this one."""
    given = shlex.join([args.recipe, *args.overrides, *import_options(args)])
    imported = use_imported(args)
    launch = imported.launch if imported is not None else None
    processes = (launch.processes or 1) if launch is not None else 1
    if processes > 1 and launched_rank().world_size == 1:
        print(
            f"hwgrpo: note: the settings are those of {processes} processes, and this is one; "
            f"`hwgrpo launch {given}` starts them",
            file=sys.stderr,
        )


def plan_devices(args: argparse.Namespace, start: str = "hwgrpo launch RECIPE --devices N --run") -> None:
    """Set the variables of a launcher for the number of devices that a dry run names.

    Args:
        args: with the options of `add_plan_options`.
        start: the command that trains on N devices.

    Raises:
        ConfigError: an option of a dry run without one, or a number of devices below 1.
    """
    for option in ("devices", "chip"):
        if getattr(args, option) is not None and not args.dry_run:
            raise ConfigError(f"--{option} {getattr(args, option)} needs --dry-run; to train on N devices use {start}")
    if args.devices is None:
        return
    if args.devices < 1:
        raise ConfigError(f"--devices {args.devices}: use 1 or more")
    os.environ.update(launcher_variables(args.devices))
