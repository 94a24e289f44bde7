"""`hwgrpo bench`: what a training step costs here, layout by layout, and what the kernels cost beside others."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hwgrpo.cli import bench_kernels
from hwgrpo.errors import ConfigError

HELP = "measure on this machine: a training step of a recipe, or the kernels next to other projects'"
STEP_HELP = "measure a training step of a recipe here: its stages, and its update in every layout side by side"
DEFAULT_RECIPE = "tiny_sort"
DONE, WRONG = 0, 1
WHOLE = ("auto", "single", "ddp")
"""Strategies that leave the policy, and its gradients, in one piece."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    measurements = parser.add_subparsers(dest="measurement", required=True, metavar="WHAT")
    step = measurements.add_parser(
        "step",
        help=STEP_HELP,
        description=f"{STEP_HELP[0].upper()}{STEP_HELP[1:]}. Layouts alternate in rounds, on the same responses "
        "and from the same weights. First, loss and gradient of each are compared with those of padded rows; one that "
        "computes something else is not timed, and the exit code is 1. Nothing is trained or saved.",
        epilog=parser.epilog,
    )
    step.add_argument(
        "overrides",
        nargs="*",
        metavar="RECIPE | key=value",
        help=f"recipe YAML, or the name of one that ships (default {DEFAULT_RECIPE}); settings that win over it",
    )
    step.add_argument(
        "--layouts",
        metavar="NAMES",
        help="layouts to compare, e.g. packed,grouped (default: all); padded and the recipe's own are always there",
    )
    step.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds to time (default 5)")
    step.add_argument("--threads", type=int, metavar="N", help="CPU threads, as trainer.threads=N")
    step.add_argument("--json", metavar="FILE", help="also write all samples as JSON (schema hwgrpo.bench.step/1)")
    kernels = measurements.add_parser(
        "kernels",
        help=bench_kernels.KERNELS_HELP,
        description=f"{bench_kernels.KERNELS_HELP[0].upper()}{bench_kernels.KERNELS_HELP[1:]}. Sides of a case take "
        "turns in rounds. First, the result of each is compared with fp64 on the same inputs; one that is off is not "
        "timed, and the exit code is 1.",
        epilog=parser.epilog,
    )
    bench_kernels.add_kernels(kernels)
    compare = measurements.add_parser(
        "compare", help=bench_kernels.COMPARE_HELP, description=bench_kernels.COMPARE_HELP, epilog=parser.epilog
    )
    bench_kernels.add_compare(compare)


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 1 when something computes another result than it should."""
    if args.measurement == "kernels":
        return bench_kernels.run_kernels(args, _writable, _tell)
    if args.measurement == "compare":
        return bench_kernels.run_compare(args, _writable)
    return _run_step(args)


def _run_step(args: argparse.Namespace) -> int:
    from hwgrpo.config import load_config

    recipe, overrides = _words(args.overrides)
    for option, value in (("--repeat", args.repeat), ("--threads", args.threads)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: give 1 or more")
    names = _layouts(args.layouts)
    file = _writable("--json", args.json)
    threads = [f"trainer.threads={args.threads}"] if args.threads else []
    quiet = ["observe.loggers=[jsonl]", "observe.progress=none", "observe.completions_per_step=0"]
    with tempfile.TemporaryDirectory(prefix="hwgrpo-bench-") as folder:
        config = load_config(
            recipe,
            [*overrides, *threads, f"trainer.output_dir={folder}", "trainer.resume=never", *quiet],
            imported=["observe"],  # nothing of it is shown
        )

        if (strategy := config.trainer.strategy) not in WHOLE:
            raise ConfigError(
                f"trainer.strategy={strategy!r} with hwgrpo bench: it compares the gradients of layouts, which takes a "
                f"policy in one piece; use {' or '.join(WHOLE)}"
            )

        from hwgrpo.cli.backend_selection import prepare_host

        if (processes := int(os.environ.get("WORLD_SIZE", 1))) > 1:
            raise ConfigError(f"hwgrpo bench measures one process, and a launcher started {processes}; start one")
        host = prepare_host(config)

        from hwgrpo_backends.device import Device

        from hwgrpo.bench.step import measure_step
        from hwgrpo.bench.step_tables import show_step
        from hwgrpo.training.setup import build_run

        built = build_run(config, host.backend, host.local_rank, host.local_world_size)
        try:
            result = measure_step(built, Device(host.backend, host.local_rank), names, args.repeat, _tell)
        finally:
            _tell("")
            built.observer.close()
            built.engine.close()
            built.strategy.close()
            if built.lock is not None:
                built.lock.close()
    show_step(result, recipe)
    if file is not None:
        document = result.to_json()
        given = {"recipe": recipe, "overrides": overrides, "repeat": args.repeat}
        file.write_text(json.dumps({"schema": document.pop("schema"), **given, **document}, indent=1) + "\n")
    return WRONG if result.wrong else DONE


def _words(words: Sequence[str]) -> tuple[str, list[str]]:
    """Tell the recipe from the settings."""
    recipes = [word for word in words if "=" not in word or Path(word).is_file()]
    if len(recipes) > 1:
        raise ConfigError(f"{' '.join(recipes)}: give one recipe, and settings as key=value")
    return recipes[0] if recipes else DEFAULT_RECIPE, [word for word in words if word not in recipes]


def _tell(what: str) -> None:
    """Say on a terminal what is done at present; nothing is animated, since that would take processor time."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


def _layouts(text: str | None) -> list[str]:
    from hwgrpo.catalog import LAYOUTS

    if text is None:
        return list(LAYOUTS.names())
    names = [name for name in text.split(",") if name]
    if not names:
        raise ConfigError(f"--layouts {text!r}: give names separated by commas: {', '.join(LAYOUTS.names())}")
    for name in names:
        LAYOUTS.check(name, "--layouts")
    return names


def _writable(option: str, name: str | None) -> Path | None:
    if name is None:
        return None
    file = Path(name)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{option} {name} cannot be written; name a file in a folder that exists and is yours")
    return file
