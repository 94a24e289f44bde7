"""`hwgrpo replay STEP_FOLDER`: a captured training step, run again on this machine and compared stage by stage."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from hwgrpo.cli.missing_operations import name_missing_operations

HELP = "run a captured training step again on this machine, and name the first stage that differs"
SCHEMA = "hwgrpo.replay/1"
SAME, DIFFERENT = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "step",
        metavar="STEP",
        help="folder of a captured step (RUN/captures/step_00003); or a file of TRL (completions_00003.parquet) or "
        "verl (ROLLOUT_DATA_DIR/3.jsonl, genstep_000003/gen_batch.dp), whose rewards and advantages are compared with "
        "those of --recipe",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="where and how to run it: backend.name, model.path, model.dtype, model.layout, kernels.pins; with another "
        "setting the table shows what it changes",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="checkpoint of the step before (default: that of the captured weights, or of the run's folder)",
    )
    parser.add_argument(
        "--recipe", metavar="RECIPE", help="for a file of TRL or verl: reward functions, estimator, model (tokenizer)"
    )
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="run the code that the captured settings name (reward functions in files, plug-ins), which is anything "
        "that who made the folder wrote; without it rewards by such code are not computed again",
    )
    parser.add_argument("--json", action="store_true", help=f"print JSON (schema {SCHEMA})")


def run(args: argparse.Namespace) -> int:
    """Print the comparison. Returns 0 where rounding explains every difference, 1 where it does not."""
    return _run_peer(args) if Path(args.step).is_file() else _run_captured(args)


def _run_captured(args: argparse.Namespace) -> int:
    from hwgrpo.cli.backend_selection import prepare_host
    from hwgrpo.cli.stored_code import check_trust, named_code, print_code
    from hwgrpo.config.named_files import with_absolute_paths
    from hwgrpo.errors import CheckpointError, ConfigError, DataError
    from hwgrpo.replay.replay_settings import captured_tree, replay_settings
    from hwgrpo.training.captured_files import FACTS, read_facts

    folder = Path(args.step)
    if args.recipe is not None:
        raise ConfigError(f"--recipe {args.recipe}: it is for files of TRL and verl; {folder} has its own settings")
    try:
        facts = read_facts(folder)
        tree = captured_tree(facts)
    except CheckpointError as error:  # an error in the command's argument
        raise ConfigError(str(error)) from error
    if args.trust_code:
        print_code(folder / FACTS, tree)
    settings = replay_settings(facts, args.overrides, None if args.trust_code else named_code(tree))
    check_trust(settings.config, [*settings.overridden], "add {}=true to the command")
    host = prepare_host(settings.config)

    import dataclasses

    import torch

    from hwgrpo.replay.replayed_model import build_replay
    from hwgrpo.replay.step_comparison import compare
    from hwgrpo.support.stage_differences import as_json, first_difference, table
    from hwgrpo.training.captured_step import read_step
    from hwgrpo.training.out_of_memory import LOADING, explain_out_of_memory
    from hwgrpo.training.shared_setup import prepare_process

    config = with_absolute_paths(settings.config)
    settings = dataclasses.replace(settings, config=config)
    device = prepare_process(config, host.backend, host.local_rank, 1)
    checkpoint = None if args.checkpoint is None else Path(args.checkpoint)
    try:
        captured = read_step(folder, facts)
        with (
            tempfile.TemporaryDirectory() as scratch,
            name_missing_operations(device),
            explain_out_of_memory(config, device, lambda: LOADING),
        ):
            model = build_replay(captured, settings, device, Path(scratch), checkpoint)
            compared = compare(model)
    except (CheckpointError, DataError) as error:
        raise ConfigError(str(error)) from error
    here = {
        "backend": host.backend.name,
        "device": device.name,
        "arch": device.arch,
        "dtype": compared.dtype,
        "layout": compared.layout,
        "torch": torch.__version__,
    }
    there = captured.facts["machine"]
    there = {key: there[key] for key in ("backend", "device", "arch", "dtype", "layout")}
    there["torch"] = captured.facts["versions"]["torch"]
    if args.json:
        record = {
            "schema": SCHEMA,
            "step": captured.step,
            "captured": there,
            "here": here,
            "weights": model.weights.place,
            "overridden": sorted(settings.overridden),
            "notes": list(compared.notes),
            **as_json(compared.stages),
        }
        print(json.dumps(record, indent=1))
    else:
        print(f"step {captured.step} of {captured.folder}; weights: {model.weights.place}")
        for name, machine in (("captured", there), ("here", here)):
            print(f"{name:8}  {machine['device']} ({machine['backend']}), torch {machine['torch']}, ", end="")
            print(f"{machine['dtype']}, layout {machine['layout']}")
        print(table(compared.stages))
        for note in compared.notes:
            print(f"hwgrpo: note: {note}", file=sys.stderr)
    return SAME if first_difference(compared.stages) is None else DIFFERENT


def _run_peer(args: argparse.Namespace) -> int:
    from hwgrpo.config import load_config
    from hwgrpo.errors import ConfigError, DataError
    from hwgrpo.replay.replay_settings import UNREAD

    if args.recipe is None:
        raise ConfigError(f"{args.step} is a file: name the recipe with its reward functions and estimator (--recipe)")
    if args.trust_code:
        raise ConfigError(
            f"--trust-code: the code that is run is that of your recipe, and none of {args.step}; omit it"
        )
    if args.checkpoint is not None:
        raise ConfigError(f"--checkpoint {args.checkpoint}: of a file of TRL or verl no model is run; omit it")
    config = load_config(args.recipe, args.overrides, data_may_be_missing=True, unread=UNREAD)

    from hwgrpo.models.loading import load_tokenizer
    from hwgrpo.replay.peer_comparison import compare_dump
    from hwgrpo.replay.peer_dumps import read_dump
    from hwgrpo.rewards.signatures import split_name
    from hwgrpo.support.jsonlines import jsonable
    from hwgrpo.support.stage_differences import as_json, first_difference, table

    functions = [split_name(function.name)[1] for function in config.reward.functions]
    try:
        tokenizer = load_tokenizer(config.model)
        dump = read_dump(Path(args.step), functions, config.rollout.n, tokenizer)
        compared = compare_dump(dump, config, tokenizer)
    except DataError as error:  # an error in the command's argument
        raise ConfigError(str(error)) from error
    if not compared.stages:
        raise ConfigError(f"{args.step}: nothing of it can be compared: {'; '.join(compared.notes)}")
    if args.json:
        record = {
            "schema": SCHEMA,
            "step": dump.step,
            "peer": dump.peer,
            "notes": list(compared.notes),
            "groups": jsonable(compared.groups),
            **as_json(compared.stages),
        }
        print(json.dumps(record, indent=1))
    else:
        counts = f"{len(dump.responses)} responses, {len(compared.groups)} groups"
        print(f"step {dump.step} of {dump.peer}, {args.step}: {counts}")
        print(table(compared.stages))
        for note in compared.notes:
            print(f"hwgrpo: note: {note}", file=sys.stderr)
    return SAME if first_difference(compared.stages) is None else DIFFERENT
