"""Going on from a checkpoint: which one, with which settings, and putting everything back in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.device import Device
from omegaconf import OmegaConf

from hwgrpo.config import Config
from hwgrpo.config.load import to_yaml
from hwgrpo.config.validate import check_resume, planned_steps
from hwgrpo.data.prompts import PromptDataset, build_dataset
from hwgrpo.errors import CheckpointError, ConfigError
from hwgrpo.models.loading import load_tokenizer
from hwgrpo.models.lora import uses_lora
from hwgrpo.observe import summary
from hwgrpo.training import checkpoints, rng
from hwgrpo.training.components import seed_everything
from hwgrpo.training.prompts import PromptSource
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update import PolicyUpdate

FIXED = ("model.path", "model.revision", "model.tokenizer", "model.chat_template", "model.lora")
"""Settings that say which function the saved parameters belong to."""
SILENT = ("trainer.resume", "trainer.output_dir", "trainer.max_steps", "observe")
"""Settings that may change without a word."""


def find_checkpoint(
    config: Config, output: Path, strategy: Strategy | None = None
) -> tuple[checkpoints.Checkpoint | None, list[str]]:
    """Return the checkpoint that `trainer.resume` asks for, and what to tell the user about it.

    Args:
        config: the run's settings.
        output: the run's folder.
        strategy: shares out the reading among its ranks, which all must call this; None: this process reads alone.

    Raises:
        ConfigError: the folder holds another run and `trainer.resume` is never, or a setting changed that cannot.
        CheckpointError: a checkpoint that was named is damaged or missing.
    """
    resume = config.trainer.resume
    if resume == "never":
        if (output / "checkpoints").exists() or (output / "metrics.jsonl").exists():
            raise ConfigError(
                f"trainer.resume='never' and trainer.output_dir={str(output)!r} holds another run; "
                "name another folder, remove this one, or use trainer.resume=auto to go on"
            )
        return None, []
    if resume == "auto":
        checkpoint, damaged = checkpoints.newest(output / "checkpoints", strategy)
        notes = [f"passed over a checkpoint: {problem}" for problem in damaged]
    else:
        check_resume(config)
        checkpoint, notes = checkpoints.verify(Path(resume).absolute(), strategy), []
    if checkpoint is not None:
        notes += _compare_settings(checkpoint, config)
    return checkpoint, notes


def compare_data(checkpoint: checkpoints.Checkpoint | None, **datasets: PromptDataset | None) -> list[str]:
    """Return a warning for each dataset that is not what it was when a checkpoint was saved.

    Args:
        checkpoint: what is resumed from; one that says nothing about its data is taken at its word.
        datasets: `train` and `validation` as they are now.
    """
    saved = checkpoint.manifest["state"].get("data", {}) if checkpoint else {}
    told = []
    for name, dataset in datasets.items():
        before = saved.get(name)
        if before and dataset is not None and before != dataset.fingerprint:
            told.append(
                f"warning: data.{name}={dataset.name!r} is not what it was at the checkpoint: {_shown(before)} then, "
                f"{_shown(dataset.fingerprint)} now; the run goes on with what is there now"
            )
    return told


def _shown(fingerprint: Mapping[str, Any]) -> str:
    return f"{fingerprint['rows']:,} rows (sha256 {fingerprint['sha256'][:12]})"


def already_finished(config: Config, prompts: int | None = None) -> str | None:
    """Say that a run is finished and how to go on, or return None where there is something left to do.

    It is finished when its last checkpoint has all the steps that are asked for and all that `finish` leaves is there:
    a run that was killed before that has to be started again.

    Args:
        config: checked settings.
        prompts: how many the training data has; None counts them where that decides.

    Raises:
        ConfigError, CheckpointError, DataError: as `find_checkpoint` and `build_dataset` do.
    """
    t = config.trainer
    output = Path(t.output_dir)
    closing = summary.read_summary(output)
    models = [output / "final"] if t.save_final_model else []
    if t.save_final_model and uses_lora(config.model.lora):
        models.append(output / "final-adapter")
    if closing.get("status") != "completed" or not all(model.is_dir() for model in models):
        return None
    checkpoint, notes = find_checkpoint(config, output)
    if checkpoint is None or checkpoint.step != closing.get("steps"):
        return None
    if checkpoint.folder.resolve().parent != (output / "checkpoints").resolve():  # that of another run
        return None
    if not t.max_steps and prompts is None:
        dataset = build_dataset(config.data, load_tokenizer(config.model), "train")
        assert dataset is not None
        prompts = len(dataset)
    planned = planned_steps(config, prompts or 0)
    if checkpoint.step < planned:
        return None
    key, asked = ("trainer.max_steps", t.max_steps) if t.max_steps else ("trainer.epochs", t.epochs)
    done = f"{checkpoint.step} of {planned} steps are done"
    if checkpoint.step > planned:
        done = f"{checkpoint.step} steps are done, {key}={asked} asks for {planned}"
    where = f", the model is in {' and '.join(map(str, models))}" if models else ""
    return "\n".join(
        [
            f"{output} is finished: {done}{where}. Nothing was trained.",
            f"To go on, set {key} to more than {max(asked, checkpoint.step) if t.max_steps else asked}; "
            "to train anew, set trainer.output_dir to another folder.",
            *(f"Note: {note}" for note in notes),
        ]
    )


def restore(
    checkpoint: checkpoints.Checkpoint, update: PolicyUpdate, source: PromptSource, strategy: Strategy, device: Device
) -> list[str]:
    """Put parameters, optimizer, data position and random state back as they were after the checkpoint's step.

    Returns:
        Notes on what could not be put back as it was.
    """
    pieces = strategy.pieces()
    checkpoints.restore(checkpoint, pieces, {piece.name: piece.shape for piece in pieces})
    strategy.pieces_written()
    state = checkpoint.manifest["state"]
    source.restore(state["sampler"])
    update.updates_done = state["updates_done"]
    update.skipped_in_a_row = state.get("skipped_in_a_row", 0)
    saved = checkpoints.load_rng(checkpoint, strategy.rank)
    if saved is not None:
        note = rng.restore(saved, device, _rank_seed(update.config, strategy.rank, checkpoint.step))
        return [note] if note else []
    # written by fewer ranks: a stream of its own, not the start of another rank's
    seed_rank(device, update.config, strategy.rank, checkpoint.step)
    return []


def seed_rank(device: Device, config: Config, rank: int, step: int = 0) -> None:
    """Give each rank its own random numbers (for dropout), once the model is made alike on all of them."""
    if rank or step:
        seed_everything(device, _rank_seed(config, rank, step))


def _rank_seed(config: Config, rank: int, step: int) -> int:
    generator = torch.Generator().manual_seed(config.trainer.seed)
    offsets = torch.randint(2**40, (2,), generator=generator).tolist()
    return config.trainer.seed + rank * offsets[0] + step * offsets[1]


def _compare_settings(checkpoint: checkpoints.Checkpoint, config: Config) -> list[str]:
    # A setting that is newer than the checkpoint had its default's effect.
    defaults = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(Config)))
    saved = _flat(OmegaConf.merge(defaults, OmegaConf.create(checkpoint.manifest["state"]["config"])))
    now = _flat(OmegaConf.create(to_yaml(config)))
    changed = {key for key in saved.keys() | now.keys() if saved.get(key) != now.get(key)}
    for key in sorted(changed):
        if _under(key, FIXED):
            raise CheckpointError(
                f"{key}={now.get(key)!r}, but {checkpoint.folder} was saved with {saved.get(key)!r}; put it back, or "
                "start afresh with another trainer.output_dir"
            )
    told = sorted(key for key in changed if not _under(key, SILENT))
    if not told:
        return []
    return ["changed since the checkpoint: " + ", ".join(f"{k} {saved.get(k)!r} -> {now.get(k)!r}" for k in told)]


def _under(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not OmegaConf.is_dict(values):
        return {prefix: OmegaConf.to_container(values) if OmegaConf.is_config(values) else values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
