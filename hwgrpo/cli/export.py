"""`hwgrpo export CHECKPOINT OUT`: write a checkpoint as a model in Hugging Face format."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hwgrpo.catalog import FINAL_DTYPES
from hwgrpo.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from hwgrpo.config import Config
    from hwgrpo.training.checkpoint.restore import Checkpoint

HELP = "write a checkpoint as a model in Hugging Face format"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="folder of a checkpoint (RUN/checkpoints/step-00000050), or of a run: its newest",
    )
    parser.add_argument("out", metavar="OUT", help="output folder: safetensors, configuration, tokenizer")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--merge", action="store_true", help="LoRA: write the model with the adapter merged (default)")
    what.add_argument("--adapter", action="store_true", help="LoRA: write the adapter alone")
    parser.add_argument(
        "--dtype",
        choices=FINAL_DTYPES,
        help="dtype of the weights (default: the run's trainer.final_dtype; auto is that of the weights in model.path, "
        "and float32 for an adapter)",
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help="maximum size of a file, e.g. 5GB (default: transformers')"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="of a run with model.trust_remote_code=true: run the Python files of the model's folder",
    )


def run(args: argparse.Namespace) -> int:
    """Write the model; return the exit code."""
    if args.max_shard_size is not None and args.adapter:
        raise ConfigError("--max-shard-size cannot be combined with --adapter: an adapter is one file")
    if args.max_shard_size is not None and not re.fullmatch(r"[1-9]\d*(KB|MB|GB)", args.max_shard_size):
        raise ConfigError(f"--max-shard-size {args.max_shard_size}: use an integer and KB, MB or GB, e.g. 500MB")
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists; use another folder, or remove it")

    from safetensors import SafetensorError

    from hwgrpo.cli.stored_code import check_trust
    from hwgrpo.models.loading import load_tokenizer
    from hwgrpo.models.lora import uses_lora
    from hwgrpo.models.saving import save_model, source_folder
    from hwgrpo.research.reward_model_run import REWARD_MODEL, load_untrained
    from hwgrpo.training.checkpoint.restore import restore_weights
    from hwgrpo.training.shared_setup import load_trainable

    checkpoint = _checkpoint(Path(args.checkpoint))
    if checkpoint.note is not None:
        print(checkpoint.note)
    config = _settings(checkpoint)
    if not args.trust_remote_code:
        check_trust(config, ["reward"], "add --trust-remote-code")
    if args.adapter and not uses_lora(config.model.lora):
        raise ConfigError(
            f"--adapter: {checkpoint.folder} was trained without LoRA, so it has no adapter; omit --adapter"
        )
    tokenizer = load_tokenizer(config.model)
    is_scored = checkpoint.manifest["state"].get("command") == REWARD_MODEL.command
    model = load_untrained(config) if is_scored else load_trainable(config)
    restore_weights(checkpoint, model)
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        source = source_folder(config.model)
        save_model(
            model,
            tokenizer,
            partial,
            merge=not args.adapter,
            max_shard_size=args.max_shard_size,
            source=source,
            dtype=args.dtype or config.trainer.final_dtype,
        )
        if out.is_dir():
            out.rmdir()
        os.replace(partial, out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{out} cannot be written: {reason}") from error
    print(f"step {checkpoint.step} of {checkpoint.folder} is in {out}")
    return 0


def _checkpoint(folder: Path) -> Checkpoint:
    from hwgrpo.training.checkpoint import restore

    if (folder / "checkpoints").is_dir():
        checkpoint, problems = restore.newest(folder / "checkpoints")
        for problem in problems:
            print(f"skipped a checkpoint: {problem}")
        if checkpoint is None:
            raise CheckpointError(f"{folder} has no readable checkpoint")
        return checkpoint
    return restore.verify(folder)


def _settings(checkpoint: Checkpoint) -> Config:
    """Return the settings of a checkpoint."""
    from hwgrpo.config.stored_settings import settings_from

    try:
        return settings_from(checkpoint.manifest["state"]["config"])
    except ConfigError as error:
        raise CheckpointError(
            f"{checkpoint.folder} was saved with settings that this version does not have: {error}; export it with the "
            "version that saved it"
        ) from error
