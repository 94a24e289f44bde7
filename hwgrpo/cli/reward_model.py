"""`hwgrpo reward-model RECIPE key=value ...`: train a reward model, which GRPO then uses as a reward."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hwgrpo.cli import sft
from hwgrpo.cli import train as train_command

if TYPE_CHECKING:
    from hwgrpo.training.supervised.supervised_setup import Training

HELP = "train a reward model on scored responses, preference pairs, or a run's own responses and their rewards"
SUFFIX = "-reward-model"
"""Appended to the recipe's `trainer.output_dir`, which is that of `hwgrpo train`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    sft.add_source(parser, SUFFIX)
    parser.add_argument(
        "--from-run", metavar="RUN", help="train on the responses in RUN/completions.jsonl and their rewards"
    )
    train_command.add_flags(parser)
    train_command.add_plan_options(parser)


def run(args: argparse.Namespace) -> int:
    """Train; return the exit code."""
    train_command.plan_devices(args, "torchrun --nproc-per-node N -m hwgrpo reward-model RECIPE")
    own = ["data.keep=null", "reward_model.score_key=reward"]
    return sft.train_on_examples(args, sft.load_settings(args, "reward-model", SUFFIX, own), _parts)


def _parts() -> Training:
    from hwgrpo.research.reward_model_run import REWARD_MODEL

    return REWARD_MODEL
