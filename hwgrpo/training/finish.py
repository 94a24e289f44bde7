"""The end of a run: the final model in Hugging Face format, and the summary."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hwgrpo.models.loading import save_model
from hwgrpo.models.lora import uses_lora
from hwgrpo.training.loop import Run, Status
from hwgrpo.training.out_of_memory import SAVING, explained


def finish(run: Run, status: Status) -> None:
    """Save what a finished or interrupted run leaves, and show the summary.

    With LoRA, `final/` is the merged model and `final-adapter/` the adapter alone. Each folder appears whole or not at
    all.
    """
    output = Path(run.config.trainer.output_dir)
    paths: dict[str, Path] = {}
    if run.strategy.rank == 0:
        with explained(run.config, run.device, lambda: SAVING):
            paths |= _save_models(run, status, output)
        if (output / "checkpoints").is_dir():
            paths["checkpoint"] = output / "checkpoints"
    run.observer.finish(status, **paths)
    run.strategy.barrier()


def _save_models(run: Run, status: Status, output: Path) -> dict[str, Path]:
    """Save what a completed run was to leave, and return the folders."""
    paths: dict[str, Path] = {}
    if status == "completed" and run.config.trainer.save_final_model:
        paths["model"] = _save(run, output / "final", merge=True)
        if uses_lora(run.config.model.lora):
            paths["adapter"] = _save(run, output / "final-adapter", merge=False)
    return paths


def _save(run: Run, folder: Path, *, merge: bool) -> Path:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_model(run.update.policy.model, run.tokenizer, partial, merge=merge)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    return folder
