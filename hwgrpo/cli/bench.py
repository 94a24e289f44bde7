"""`hwgrpo bench step RECIPE key=value ...`: what a training step costs here, and in which layout it costs least."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from hwgrpo.errors import ConfigError

HELP = "time a training step of a recipe here: its stages, and its update in every layout side by side"
WRONG = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("what", choices=("step",), help="what to time")
    parser.add_argument("recipe", help="recipe YAML, or the name of one that ships (tiny_sort)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the recipe's")
    parser.add_argument("--layouts", metavar="NAMES", help="layouts to compare, e.g. padded,grouped (default: all)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds to time (default 5)")
    parser.add_argument("--json", metavar="FILE", help="also write all samples as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 1 when a layout computes something else than padded rows do."""
    from hwgrpo.config import load_config
    from hwgrpo.training import LAYOUTS

    if args.repeat < 1:
        raise ConfigError(f"--repeat {args.repeat}: give 1 or more")
    names = args.layouts.split(",") if args.layouts else LAYOUTS.names()
    for name in names:
        LAYOUTS.check(name, "--layouts")
    file = Path(args.json) if args.json else None
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ConfigError(f"--json {file} cannot be written; name a file in a folder that exists")

    with tempfile.TemporaryDirectory(prefix="hwgrpo-bench-") as folder:
        quiet = ["observe.loggers=[jsonl]", "observe.progress=none", "observe.completions_per_step=0"]
        config = load_config(
            args.recipe, [*args.overrides, f"trainer.output_dir={folder}", "trainer.resume=never", *quiet]
        )
        from hwgrpo.cli.host import prepare_host

        host = prepare_host(config)
        if host.world_size > 1:
            raise ConfigError(f"hwgrpo bench step times one process, and {host.world_size} were started; start one")

        from hwgrpo_backends.device import Device

        from hwgrpo.bench.step import measure_step
        from hwgrpo.bench.table import table
        from hwgrpo.training.build import build_run

        built = build_run(config, host.backend, host.local_rank, host.local_world_size)
        try:
            result = measure_step(built, config, Device(host.backend, host.local_rank), names, args.repeat)
        finally:
            built.observer.close()
            built.engine.close()
            built.strategy.close()
    if file is not None:
        file.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    print(table(result))
    return WRONG if any(layout.wrong for layout in result.layouts) else 0
