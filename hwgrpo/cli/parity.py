"""`hwgrpo parity`: one training step on this machine's device against fp64 on its CPU, stage by stage."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hwgrpo.parity.comparison import Parity

HELP = "compare one training step on this machine's device with fp64 on its CPU, stage by stage"
SCHEMA = "hwgrpo.parity/1"
MODEL = "builtin://tiny?task=sort"
SAME, DIFFERENT = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help=f"what to compare: model.path=FOLDER (default {MODEL}), model.dtype, model.layout, model.attention, "
        "backend.name, kernels.pins",
    )
    parser.add_argument("--json", action="store_true", help=f"print JSON (schema {SCHEMA})")


def run(args: argparse.Namespace) -> int:
    """Print the comparison. Returns 0 where rounding explains every difference, 1 where it does not."""
    from hwgrpo.cli.backend_selection import prepare_host
    from hwgrpo.config import load_config
    from hwgrpo.parity.settings import BASE, check_settings

    check_settings(args.overrides)
    config = load_config(None, [f"model.path={MODEL}", *BASE, *args.overrides])
    host = prepare_host(config)

    import torch

    from hwgrpo.parity.comparison import compare
    from hwgrpo.training.shared_setup import prepare_process

    device = prepare_process(config, host.backend, host.local_rank, 1)
    with tempfile.TemporaryDirectory() as folder:
        parity = compare(config, device, Path(folder))
    machine = {"device": device.name, "backend": host.backend.name, "torch": torch.__version__}
    if args.json:
        print(json.dumps({"schema": SCHEMA, **machine, "model": config.model.path, **_report(parity)}, indent=1))
    else:
        print(f"{device.name} ({host.backend.name}, {parity.dtype}), torch {torch.__version__}, layout {parity.layout}")
        print(table(parity))
        for note in parity.notes:
            print(f"hwgrpo: {note}", file=sys.stderr)
    return SAME if parity.first_difference is None else DIFFERENT


def table(parity: Parity) -> str:
    """Return a line per stage: largest error, tolerance, and the share of it that the error takes; then the verdict."""
    width = max(len(stage.name) for stage in parity.stages)
    lines = [f"{'stage':{width}}  {'error':>8}  {'tolerance':>9}  {'share':>6}"]
    for stage in parity.stages:
        share = stage.error / stage.tolerance if stage.tolerance else float(stage.error > 0)
        verdict = "" if stage.passed else f"  DIFFERS{', most in ' + stage.worst if stage.worst else ''}"
        lines.append(f"{stage.name:{width}}  {stage.error:8.2g}  {stage.tolerance:9.2g}  {share:6.2f}{verdict}")
    first = parity.first_difference
    verdict = "rounding explains every difference" if first is None else f"first difference: {first.name}"
    return "\n".join([*lines, verdict])


def _report(parity: Parity) -> dict[str, object]:
    first = parity.first_difference
    return {
        "dtype": parity.dtype,
        "layout": parity.layout,
        "passed": first is None,
        "first_difference": None if first is None else first.name,
        "stages": [asdict(stage) | {"passed": stage.passed} for stage in parity.stages],
        "notes": list(parity.notes),
    }
