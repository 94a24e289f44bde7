"""`hwgrpo bench`: time and memory of a training step per layout, and of the kernels next to other projects'."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo.cli import bench_kernels, bench_ledger
from hwgrpo.errors import ConfigError, choice_error
from hwgrpo.support.launched_ranks import launched_rank

if TYPE_CHECKING:
    from hwgrpo_backends.device import Device

    from hwgrpo.training.run_parts import Run

HELP = "measure on this machine: a training step of a recipe, or the kernels next to other projects'"
STEP_HELP = "measure a training step of a recipe: its stages, and its update in each layout side by side"
DEFAULT_RECIPE = "tiny_sort"
DONE, WRONG = 0, 1
UNSHARDED = ("auto", "single", "ddp")
"""Strategies that shard neither the policy nor its gradients."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    measurements = parser.add_subparsers(dest="measurement", required=True, metavar="WHAT")
    step = measurements.add_parser(
        "step",
        help=STEP_HELP,
        description=f"{STEP_HELP[0].upper()}{STEP_HELP[1:]}. Layouts alternate in rounds, on the same responses "
        "and from the same weights. First, loss and gradient of each are compared with those of padded rows; one with "
        "another result is not timed, and the exit code is 1. Nothing is trained or saved.",
        epilog=parser.epilog,
    )
    step.add_argument(
        "overrides",
        nargs="*",
        metavar="RECIPE | key=value",
        help=f"recipe YAML, or the name of a shipped recipe (default {DEFAULT_RECIPE}); settings that override it",
    )
    step.add_argument(
        "--layouts",
        metavar="NAMES",
        help="layouts to compare, e.g. packed,grouped (default: all); padded and the recipe's own are always included",
    )
    step.add_argument(
        "--losses",
        metavar="NAMES",
        help="instead, time an update with each of these policy losses beside one with ppo_clip, e.g. gspo,kl_cov, or "
        "all; masks that take a scoring pass count as losses",
    )
    bench_ledger.add_ledger(step)
    step.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds to time (default 5)")
    step.add_argument("--threads", type=int, metavar="N", help="CPU threads, like trainer.threads=N")
    step.add_argument(
        "--json",
        metavar="FILE",
        help="also write all samples as JSON (schema hwgrpo.bench.step/1; of losses hwgrpo.bench.losses/1, of a "
        "ledger hwgrpo.bench.ledger/1)",
    )
    kernels = measurements.add_parser(
        "kernels",
        help=bench_kernels.KERNELS_HELP,
        description=f"{bench_kernels.KERNELS_HELP[0].upper()}{bench_kernels.KERNELS_HELP[1:]}. Implementations of "
        "a case alternate in rounds. First, the result of each is compared with fp64 on the same inputs; a wrong one "
        "is not timed, and the exit code is 1.",
        epilog=parser.epilog,
    )
    bench_kernels.add_kernels(kernels)
    compare = measurements.add_parser(
        "compare", help=bench_kernels.COMPARE_HELP, description=bench_kernels.COMPARE_HELP, epilog=parser.epilog
    )
    bench_kernels.add_compare(compare)


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 1 when a result is wrong."""
    if args.measurement == "kernels":
        return bench_kernels.run_kernels(args, _writable, _show_progress)
    if args.measurement == "compare":
        return bench_kernels.run_compare(args, _writable)
    return _run_step(args)


def _run_step(args: argparse.Namespace) -> int:
    from hwgrpo.config import load_config

    recipe, overrides = _split_recipe(args.overrides)
    for option, value in (("--repeat", args.repeat), ("--threads", args.threads)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: use 1 or more")
    if args.chip is not None and not args.ledger:
        raise ConfigError(f"--chip {args.chip} without --ledger: measurements are of this machine; leave it out")
    if args.ledger:
        bench_ledger.run_ledger(args, recipe, overrides, _writable("--json", args.json))
        return DONE
    if args.losses is not None and args.layouts is not None:
        raise ConfigError("--layouts and --losses are two measurements; give one of them")
    names = _layouts(args.layouts)
    file = _writable("--json", args.json)
    threads = [f"trainer.threads={args.threads}"] if args.threads else []
    quiet = ["observe.loggers=[jsonl]", "observe.progress=none", "observe.completions_per_step=0"]
    with tempfile.TemporaryDirectory(prefix="hwgrpo-bench-") as folder:
        config = load_config(
            recipe,
            [*overrides, *threads, f"trainer.output_dir={folder}", "trainer.resume=never", *quiet],
            imported=["observe"],  # not shown in the result
        )

        if (strategy := config.trainer.strategy) not in UNSHARDED:
            raise ConfigError(
                f"trainer.strategy={strategy!r} with hwgrpo bench: it compares gradients of layouts, which needs an "
                f"unsharded policy; use {' or '.join(UNSHARDED)}"
            )

        from hwgrpo.cli.backend_selection import prepare_host

        if (processes := launched_rank().world_size) > 1:
            raise ConfigError(f"hwgrpo bench needs one process, but a launcher started {processes}")
        host = prepare_host(config)

        from hwgrpo_backends.device import Device

        losses = _losses(args.losses)  # imports torch, which reads the environment that the host needs

        from hwgrpo.training.setup import build_run

        built = build_run(config, host.backend, host.local_rank, host.local_world_size)
        device = Device(host.backend, host.local_rank)
        try:
            if losses:
                document, wrong = _compare_losses(built, device, losses, args.repeat), False
            else:
                document, wrong = _measure_stages(built, device, names, args.repeat, recipe)
        finally:
            _show_progress("")
            built.observer.close()
            built.engine.close()
            built.strategy.close()
            if built.lock is not None:
                built.lock.close()
    if file is not None:
        arguments = {"recipe": recipe, "overrides": overrides, "repeat": args.repeat}
        file.write_text(json.dumps({"schema": document.pop("schema"), **arguments, **document}, indent=1) + "\n")
    return WRONG if wrong else DONE


def _measure_stages(
    run: Run, device: Device, layouts: Sequence[str], repeat: int, recipe: str
) -> tuple[dict[str, Any], bool]:
    """Measure and show the stages of a step and the layouts; return the JSON, and whether a result was wrong."""
    from hwgrpo.bench.step import measure_step
    from hwgrpo.bench.step_tables import show_step

    result = measure_step(run, device, layouts, repeat, _show_progress)
    _show_progress("")
    show_step(result, recipe)
    return result.to_json(), bool(result.wrong)


def _compare_losses(run: Run, device: Device, losses: Sequence[str], repeat: int) -> dict[str, Any]:
    """Measure and show updates with each loss beside ppo_clip; return the JSON."""
    from hwgrpo.bench.loss_comparison import measure_losses, table
    from hwgrpo.bench.machine import machine_facts

    facts = machine_facts(device)
    benches = measure_losses(run, device, losses, repeat, _show_progress)
    _show_progress("")
    print("\n".join(table(benches)))
    return {"schema": "hwgrpo.bench.losses/1", "machine": facts, "losses": [each.to_json() for each in benches]}


def _split_recipe(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the recipe and the settings."""
    recipes = [each for each in arguments if "=" not in each or Path(each).is_file()]
    if len(recipes) > 1:
        raise ConfigError(f"{' '.join(recipes)}: use one recipe, and settings as key=value")
    return recipes[0] if recipes else DEFAULT_RECIPE, [each for each in arguments if each not in recipes]


def _show_progress(text: str) -> None:
    """Show the current measurement on a terminal; nothing is animated, since that would take CPU time."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _layouts(text: str | None) -> list[str]:
    from hwgrpo.catalog import LAYOUTS

    if text is None:
        return list(LAYOUTS.names())
    names = [name for name in text.split(",") if name]
    if not names:
        raise ConfigError(f"--layouts {text!r}: use names separated by commas: {', '.join(LAYOUTS.names())}")
    for name in names:
        LAYOUTS.check(name, "--layouts")
    return names


def _losses(text: str | None) -> tuple[str, ...]:
    """Return the losses to compare; none if the option is not given."""
    if text is None:
        return ()
    from hwgrpo.bench.loss_comparison import known_names

    names = known_names() if text == "all" else tuple(name for name in text.split(",") if name)
    if not names:
        raise ConfigError(f"--losses {text!r}: use names separated by commas, or all: {', '.join(known_names())}")
    for name in names:
        if name not in known_names():
            raise choice_error("--losses", name, known_names())
    return names


def _writable(option: str, name: str | None) -> Path | None:
    if name is None:
        return None
    file = Path(name)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{option} {name} cannot be written; use a file in an existing, writable folder")
    return file
