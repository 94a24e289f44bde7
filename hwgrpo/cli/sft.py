"""`hwgrpo sft RECIPE key=value ...`: supervised fine-tuning, the warm start before GRPO."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hwgrpo.cli import train as train_command
from hwgrpo.errors import ConfigError

if TYPE_CHECKING:
    from hwgrpo.config import Config
    from hwgrpo.training.supervised.supervised_setup import Training

HELP = "fine-tune a language model on responses (SFT) with a recipe of train, or on a run's own correct responses"
SUFFIX = "-sft"
"""Appended to the recipe's `trainer.output_dir`, which is that of `hwgrpo train`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_source(parser, SUFFIX)
    add_flags(parser)
    train_command.add_flags(parser)
    train_command.add_plan_options(parser)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the options that only this command has, and `hwgrpo launch`."""
    parser.add_argument("--from-run", metavar="RUN", help="train on the responses in RUN/completions.jsonl")
    parser.add_argument(
        "--keep",
        metavar="CONDITION",
        help="with --from-run, the responses to train on: correct (reward>0.5, the default) or e.g. 'reward>=0.8'; "
        "each pair of prompt and response counts once",
    )


def launched_config(args: argparse.Namespace) -> Config:
    """Return the settings for `hwgrpo launch`: data and secrets may be on another host."""
    from hwgrpo.config.supervised import supervised_settings

    return supervised_settings(_config(args, is_here=False))


def add_source(parser: argparse.ArgumentParser, suffix: str) -> None:
    """Declare the arguments of a command that trains on examples: recipe and overrides."""
    parser.add_argument(
        "recipe",
        nargs="?",
        help="recipe YAML, or the name of a shipped recipe (tiny_sort); its rollout, reward and algorithm are not "
        "used. With --from-run it may be left out: the run's settings",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help=f"settings that override the recipe; without trainer.output_dir the folder is the recipe's with {suffix}",
    )


def run(args: argparse.Namespace) -> int:
    """Train; return the exit code."""

    def parts() -> Training:
        from hwgrpo.training.supervised.supervised_setup import SFT

        return SFT

    train_command.plan_devices(args, "hwgrpo launch sft RECIPE --devices N --run")
    return train_on_examples(args, _config(args), parts)


def _config(args: argparse.Namespace, *, is_here: bool = True) -> Config:
    if args.keep and not args.from_run:
        raise ConfigError("--keep is for --from-run; for files set data.keep")
    return load_settings(args, "sft", SUFFIX, [f"data.keep={args.keep or 'correct'}"], is_here=is_here)


def train_on_examples(args: argparse.Namespace, config: Config, parts: Callable[[], Training]) -> int:
    """Train, or print settings or plan; return the exit code.

    Args:
        args: with the flags of `train`.
        config: from `load_settings`.
        parts: imports what differs between commands, once the device's environment variables are set.
    """
    from hwgrpo.config.load import to_yaml
    from hwgrpo.config.supervised import supervised_settings
    from hwgrpo.config.validate import check_resume

    check_resume(config)
    if args.print_config:
        print(to_yaml(config, shown=True), end="")
        return 0
    planned = supervised_settings(config)
    if args.dry_run:
        from hwgrpo.cli.run_plan import print_supervised_plan

        return print_supervised_plan(planned, parts, chip=args.chip)

    from hwgrpo.cli.backend_selection import prepare_host

    host = prepare_host(planned)
    from hwgrpo_backends.device import Device

    from hwgrpo.cli.run_start import print_finished
    from hwgrpo.errors import RunFinished
    from hwgrpo.planning.strategy_choice import resolve_strategy
    from hwgrpo.training.finish import finish
    from hwgrpo.training.loop import run_steps
    from hwgrpo.training.supervised.supervised_setup import build_supervised

    training = parts()
    training.check(planned)
    device = Device(host.backend, host.local_rank)
    notes = resolve_strategy(planned, host.backend, host.world_size, device, supervised=True)
    config.trainer = dataclasses.replace(planned.trainer, epochs_per_batch=config.trainer.epochs_per_batch)
    try:
        ranks = host.local_rank, host.local_world_size
        run = build_supervised(
            config, host.backend, *ranks, training=training, allow_finished=args.allow_finished, notes=notes
        )
    except RunFinished as finished:
        if host.rank == 0:
            print_finished(finished)
        return 0
    try:
        finish(run, run_steps(run, training.step, training.validate))
    finally:
        run.close()
    run.strategy.close()  # only after success: a failed rank would wait here for ranks that wait for it
    return 0


def load_settings(
    args: argparse.Namespace, command: str, suffix: str, of_run: Sequence[str] = (), *, is_here: bool = True
) -> Config:
    """Return the run's settings.

    Args:
        args: the command's arguments.
        command: its name, for messages.
        suffix: appended to the recipe's `trainer.output_dir`.
        of_run: overrides for the responses of a run.
        is_here: the run's data and secrets are on this host.

    Raises:
        ConfigError: neither a recipe nor a run is named, or the run has logged no responses.
    """
    from hwgrpo.config import load_config
    from hwgrpo.config.supervised import supervised_settings

    recipe, overrides = args.recipe, list(args.overrides)
    if args.from_run and recipe and "=" in recipe:  # `sft --from-run RUN key=value`
        recipe, overrides = None, [recipe, *overrides]
    if args.from_run:
        folder = Path(args.from_run)
        responses = folder / "completions.jsonl"
        if not responses.is_file():
            raise ConfigError(f"--from-run {folder}: there is no {responses}, where a run of hwgrpo logs its responses")
        recipe = recipe or str(folder / "config.yaml")
        own = (f"data.train={responses}", "data.prompt_key=prompt", "data.response_key=response")
        overrides = [*own, *of_run, *overrides]
    if recipe is None:
        raise ConfigError(f"name a recipe (hwgrpo {command} RECIPE), or a run with --from-run RUN")
    config = load_config(
        recipe,
        overrides,
        data_may_be_missing=args.dry_run or not is_here,
        variables_may_be_missing=args.print_config or not is_here,
        imported=("data", "trainer") if args.from_run else (),
        used=supervised_settings,
    )
    if not any(each.startswith("trainer.output_dir=") for each in overrides):
        config.trainer.output_dir += suffix
    return config
