"""`hwgrpo parity`: one training step on this machine's device against fp64 on its CPU, stage by stage."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo.cli.missing_operations import name_missing_operations
from hwgrpo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hwgrpo_backends.device import Device

    from hwgrpo.config import Config
    from hwgrpo.parity.comparison import Parity

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
    parser.add_argument(
        "--families",
        action="store_true",
        help="compare tiny random models of several architectures (a large vocabulary, windows, soft-caps, experts, "
        "linear attention, images)",
    )
    parser.add_argument(
        "--layers",
        metavar="N",
        help="compare a large model layer by layer from its files: N layers from first to last (or all), each alone",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what this machine computed, for --against")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="compare with what another machine computed, besides fp64"
    )
    parser.add_argument("--json", action="store_true", help=f"print JSON (schema {SCHEMA})")


def run(args: argparse.Namespace) -> int:
    """Print the comparisons. Returns 0 where rounding explains every difference, 1 where it does not."""
    from hwgrpo.cli.backend_selection import prepare_host
    from hwgrpo.parity.settings import load_settings

    if args.save and not args.save.absolute().parent.is_dir():
        raise ConfigError(f"--save {args.save}: its folder does not exist; make it, or choose another place")
    if args.families and (args.save or args.against):
        raise ConfigError("--families with --save or --against: save one model, with model.path")
    if args.layers is not None and (args.families or args.save or args.against):
        raise ConfigError(f"--layers {args.layers} with --families, --save or --against: leave one of them out")
    config = load_settings(args.overrides, families=args.families)
    host = prepare_host(config)

    import torch

    from hwgrpo.parity import saved_step
    from hwgrpo.support.stage_differences import as_json, first_difference, table
    from hwgrpo.training.shared_setup import prepare_process

    theirs = saved_step.read(args.against) if args.against else None
    device = prepare_process(config, host.backend, host.local_rank, host.local_world_size)
    machine = {"device": device.name, "backend": host.backend.name, "torch": torch.__version__}
    reports: list[dict[str, Any]] = []
    passed = True
    for name, each in _models(config, families=args.families):
        with tempfile.TemporaryDirectory() as folder:
            parity = _compare(each, device, Path(folder), args.layers)
        if not parity.is_main:
            passed &= first_difference(parity.stages) is None
            continue
        comparisons = {"fp64": parity.stages}
        mine = saved_step.SavedStep(parity.tensors, parity.model, _line(machine, parity))
        if theirs is not None:
            comparisons[theirs.machine] = tuple(saved_step.compare_steps(mine, theirs, args.against))
        for other, stages in comparisons.items():
            passed &= first_difference(stages) is None
            reports.append(machine | _facts(name, parity) | {"against": other} | as_json(stages))
            if not args.json:
                print(f"{name}: {_line(machine, parity)}, against {other}", *parity.notes, table(stages), sep="\n")
        if args.save:
            saved_step.write(args.save, mine)
    if args.json and reports:
        print(json.dumps({"schema": SCHEMA, "passed": passed, "comparisons": reports}, indent=1, allow_nan=False))
    return SAME if passed else DIFFERENT


def _compare(config: Config, device: Device, folder: Path, layers: str | None) -> Parity:
    """Compare, and name what keeps a device from computing the step."""
    from hwgrpo.parity.comparison import compare
    from hwgrpo.parity.layer_comparison import compare_layers
    from hwgrpo.training.out_of_memory import LOADING, explain_out_of_memory
    from hwgrpo.training.strategies.lost_ranks import name_lost_ranks

    with name_missing_operations(device), name_lost_ranks(), explain_out_of_memory(config, device, lambda: LOADING):
        if layers is None:
            return compare(config, device, folder)
        return compare_layers(config, device, folder, layers, _report)


def _report(line: str) -> None:
    """Print a line of progress."""
    print(f"hwgrpo: {line}", file=sys.stderr, flush=True)


def _models(config: Config, *, families: bool) -> Iterator[tuple[str, Config]]:
    """Yield name and settings of each model."""
    from copy import deepcopy

    from hwgrpo.parity.families import FAMILIES, VISION_FAMILIES, save_family, why_left_out

    if not families:
        yield config.model.path, config
        return
    for name in (*FAMILIES, *VISION_FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            save_family(name, Path(folder))
            of_family = deepcopy(config)
            of_family.model.path = folder
            reason = why_left_out(of_family) if name in VISION_FAMILIES else None
            if reason is None:
                yield name, of_family
            else:
                _report(f"{name} is left out: {reason}")


def _line(machine: dict[str, str], parity: Parity) -> str:
    return f"{machine['device']} ({machine['backend']}, {parity.dtype}), torch {machine['torch']}"


def _facts(name: str, parity: Parity) -> dict[str, Any]:
    return {"model": name, "dtype": parity.dtype, "layout": parity.layout, "notes": list(parity.notes)}
