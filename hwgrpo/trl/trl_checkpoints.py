"""`output_dir/checkpoint-N`, where scripts of TRL look for a checkpoint.

A run saves `checkpoints/step-S`. Beside it lies `checkpoint-N`, N the number of updates, with `trainer_state.json`, a
pointer to the checkpoint, and for callbacks with `on_save` the model.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from transformers import TrainerState

from hwgrpo.errors import ConfigError
from hwgrpo.support.paths import with_home
from hwgrpo.trl.grpo_config import note

STATE = "trainer_state.json"
POINTER = "checkpoint.txt"
"""File with the path of the checkpoint, relative to the folder."""
_NAME = re.compile(r"checkpoint-(\d+)")


def write_state(output: Path, saved: Path, state: TrainerState) -> Path:
    """Write `checkpoint-N` of a checkpoint, remove those whose checkpoint is gone, and return the folder.

    Args:
        output: the run's folder.
        saved: folder of the checkpoint, in `output`; it may still be written in the background.
        state: the trainer's.
    """
    folder = folder_of(output, state.global_step)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{STATE}.partial"
    state.save_to_json(str(partial))
    os.replace(partial, folder / STATE)
    (folder / POINTER).write_text(os.path.relpath(saved.resolve(), folder.resolve()) + "\n", encoding="utf-8")
    for other in output.glob("checkpoint-*"):
        target = _target(other)
        if target is not None and other != folder and not target.is_dir():
            shutil.rmtree(other)
    return folder


def folder_of(output: Path, updates: int) -> Path:
    """Return the folder after a number of updates."""
    return output / f"checkpoint-{updates}"


def resolve(checkpoint: str) -> str:
    """Return the value of `trainer.resume`: the checkpoint of a folder `checkpoint-N`, or any other path as it is.

    Raises:
        ConfigError: it is no folder.
    """
    checkpoint = with_home(checkpoint)
    if not Path(checkpoint).is_dir():
        beside = sorted(each.name for each in Path(checkpoint).absolute().parent.glob("checkpoint-*"))
        there = f"there are: {', '.join(beside)}" if beside else "True is the newest checkpoint of output_dir"
        raise ConfigError(f"resume_from_checkpoint={checkpoint!r} is no folder; {there}")
    target = _target(Path(checkpoint))
    if target is not None and not target.is_dir():
        note(f"{checkpoint}: its checkpoint {target} is not there; the newest one is used")
        return "auto"
    return checkpoint if target is None else str(target)


def restore_state(state: TrainerState, runs: list[Path], updates: int) -> None:
    """Continue the log history, the count of tokens and the best metric of a resumed run.

    Args:
        state: changed in place.
        runs: folders of the runs that may have saved the state, the likeliest first.
        updates: those that the run has done.
    """
    for run in runs:
        file = folder_of(run, updates) / STATE
        if file.is_file():
            stored = TrainerState.load_from_json(str(file))
            for name in ("log_history", "num_input_tokens_seen", "best_metric", "best_global_step"):
                setattr(state, name, getattr(stored, name))
            return


def _target(folder: Path) -> Path | None:
    pointer = folder / POINTER
    if not _NAME.fullmatch(folder.name) or not pointer.is_file():
        return None
    return (folder / pointer.read_text(encoding="utf-8").strip()).resolve()
