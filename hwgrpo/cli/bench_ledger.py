"""`hwgrpo bench step --ledger`: the kernels of a training step, counted without the device that would run them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from hwgrpo.errors import ConfigError

DEFAULT_CHIP = "H100 SXM"
LEDGER_HELP = (
    "instead, count the kernels, bytes and FLOPs of each stage on a GPU, and model their time; needs no GPU, and no "
    "weights of the model"
)


def add_ledger(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--ledger", action="store_true", help=LEDGER_HELP)
    parser.add_argument(
        "--chip",
        metavar="NAME",
        help=f"with --ledger: the chip of the modelled times (part of its name is enough; default {DEFAULT_CHIP})",
    )


def run_ledger(args: argparse.Namespace, recipe: str, overrides: Sequence[str], file: Path | None) -> None:
    """Count a step, print its ledger, and write it to a file if there is one."""
    from hwgrpo.cli.chips import closest_chip
    from hwgrpo.config import load_config

    for option in ("layouts", "losses", "threads"):
        if getattr(args, option) is not None:
            raise ConfigError(f"--ledger with --{option}: a ledger runs nothing; leave out one of the two")
    config = load_config(recipe, overrides, data_may_be_missing=True)
    if (strategy := config.trainer.strategy) not in ("auto", "single"):
        raise ConfigError(f"trainer.strategy={strategy!r} with --ledger: it counts for one device; use single")
    chip, backend = closest_chip(args.chip or DEFAULT_CHIP, config)
    if "triton" not in backend.kernels or backend.record is None or chip.bandwidth is None:
        raise ConfigError(
            f"--chip {chip.title}: a ledger knows the kernels of GPUs and needs the chip's bandwidth; use e.g. "
            f"{DEFAULT_CHIP}"
        )

    from hwgrpo.bench.ledger.kernel_costs import Rates
    from hwgrpo.bench.ledger.kernel_ledger import KernelLedger
    from hwgrpo.bench.ledger.ledger_step import count_step
    from hwgrpo.bench.ledger.ledger_tables import ledger_json, show_ledger

    rates = Rates.of(chip)
    stages = count_step(config, KernelLedger(rates), backend)
    show_ledger(stages, rates, config, recipe)
    if file is not None:
        document = ledger_json(stages, rates)
        arguments = {"recipe": recipe, "overrides": list(overrides)}
        file.write_text(json.dumps({"schema": document.pop("schema"), **arguments, **document}, indent=1) + "\n")
