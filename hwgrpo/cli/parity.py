"""`hwgrpo parity`: one training step on this machine's device against fp64 on its CPU, stage by stage."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

HELP = "compare one training step on this machine's device with fp64 on its CPU, stage by stage"
SCHEMA = "hwgrpo.parity/1"
SAME, DIFFERENT = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="what to compare: model.path=FOLDER (default: a tiny built-in model), model.dtype, model.layout, "
        "model.attention, backend.name, kernels.pins",
    )
    parser.add_argument("--json", action="store_true", help=f"print JSON (schema {SCHEMA})")


def run(args: argparse.Namespace) -> int:
    """Print the comparison. Returns 0 where rounding explains every difference, 1 where it does not."""
    from hwgrpo.cli.backend_selection import prepare_host
    from hwgrpo.parity.settings import load_settings

    config = load_settings(args.overrides)
    host = prepare_host(config)

    import torch

    from hwgrpo.parity.comparison import compare
    from hwgrpo.parity.stages import as_json, first_difference, table
    from hwgrpo.training.shared_setup import prepare_process

    device = prepare_process(config, host.backend, host.local_rank, 1)
    with tempfile.TemporaryDirectory() as folder:
        parity = compare(config, device, Path(folder))
    if args.json:
        report = {
            "schema": SCHEMA,
            "device": device.name,
            "backend": host.backend.name,
            "torch": torch.__version__,
            "model": config.model.path,
            "dtype": parity.dtype,
            "layout": parity.layout,
            "notes": list(parity.notes),
        }
        print(json.dumps(report | as_json(parity.stages), indent=1, allow_nan=False))
    else:
        print(f"{device.name} ({host.backend.name}, {parity.dtype}), torch {torch.__version__}, layout {parity.layout}")
        for note in parity.notes:
            print(note)
        print(table(parity.stages))
    return SAME if first_difference(parity.stages) is None else DIFFERENT
