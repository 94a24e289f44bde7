"""The end of a run: the final model in Hugging Face format, and the summary."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hwgrpo.errors import RunError
from hwgrpo.models.lora import uses_lora
from hwgrpo.models.saving import save_model, source_folder
from hwgrpo.training.checkpoint.checkpoint_files import discard, folder_of
from hwgrpo.training.checkpoint.restore import newest_step
from hwgrpo.training.loop import Status
from hwgrpo.training.online_rewards import final_models
from hwgrpo.training.out_of_memory import SAVING, explain_out_of_memory
from hwgrpo.training.run_folder import raise_if_moved
from hwgrpo.training.run_parts import TrainingRun
from hwgrpo.training.strategies.lost_ranks import name_lost_ranks


def finish(run: TrainingRun, status: Status) -> None:
    """Save the final model of a completed run, and show the summary.

    With LoRA, `final/` is the merged model and `final-adapter/` the adapter alone; a reward model that was trained is
    `final-NAME/`. Each folder appears complete or not at all. A signal that ends the run after its last step waits for
    model and summary; a second one does not, also where the loop has the first.

    Raises:
        RunError: memory ran out, the final model cannot be written, the run's folder was moved, or a rank is lost.
    """
    output = Path(run.config.trainer.output_dir)
    with run.interrupt, name_lost_ranks():
        raise_if_moved(run.lock, run.strategy)
        paths: dict[str, Path] = {}
        with explain_out_of_memory(run.config, run.device, lambda: SAVING):
            paths |= _save_models(run, status, output)
        if run.strategy.rank == 0 and (output / "checkpoints").is_dir():
            paths["checkpoint"] = output / "checkpoints"
        run.observer.finish(status, **paths)
        run.strategy.barrier()


def _save_models(run: TrainingRun, status: Status, output: Path) -> dict[str, Path]:
    """Save the final model of a completed run on rank 0; return its folders there."""
    paths: dict[str, Path] = {}
    if status == "completed" and run.config.trainer.save_final_model:
        model = full_model(run)
        if model is not None:
            paths["model"] = _save_policy(run, model, output / "final", merge=True)
            if uses_lora(run.config.model.lora):
                paths["adapter"] = _save_policy(run, model, output / "final-adapter", merge=False)
        for name, write in final_models(run).items() if run.strategy.rank == 0 else ():
            paths[name] = _save(run, output / f"final-{name}", write)
    return paths


@torch.no_grad()
def full_model(run: TrainingRun) -> Any:
    """Return the unsharded trained model on rank 0, None on others; shards are gathered in host memory."""
    main = run.strategy.rank == 0
    if not run.strategy.shards:
        return run.update.policy.model if main else None
    model = run.load_model(run.config) if main else None
    own = dict(model.named_parameters()) if model is not None else {}
    for name, weight in run.strategy.gather_full_parameters(trainable_only=True):
        if main:
            own[name].copy_(weight)
    return model


def _save_policy(run: TrainingRun, model: Any, folder: Path, *, merge: bool) -> Path:
    source = source_folder(run.config.model)
    dtype = run.config.trainer.final_dtype

    def write(partial: Path) -> None:
        save_model(model, run.tokenizer, partial, merge=merge, source=source, dtype=dtype)

    checkpoints = folder.parent / "checkpoints"
    newest = newest_step(checkpoints)
    if newest is None:
        return _save(run, folder, write)
    options = " --trust-remote-code" if run.config.model.trust_remote_code else ""
    options += "" if merge else " --adapter"
    remedy = f"; or write it elsewhere: hwgrpo export {folder_of(checkpoints, newest)} OUT{options}"
    return _save(run, folder, write, remedy)


def _save(run: TrainingRun, folder: Path, write: Callable[[Path], None], remedy: str = "") -> Path:
    """Write a folder that appears complete or not at all.

    Args:
        run: the run.
        folder: the folder, which is replaced.
        write: writes it at another path.
        remedy: how to get the model in another way, for the message of a failure.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        discard(partial)
        partial.mkdir()  # without parents: a run's folder that was moved is not recreated
        write(partial)
        if folder.is_dir():  # nothing else is replaced: it is not the run's
            shutil.rmtree(folder)
        os.replace(partial, folder)
    except Exception as error:
        moved = run.lock.moved() if run.lock is not None else None
        if moved is None and partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)  # frees space on a full disk
        if run.device.is_oom(error):
            raise
        reason = str(error) or type(error).__name__
        raise RunError(
            moved
            or f"the final model could not be written to {folder}: {reason}; make room or restore "
            f"access there, then start again: the run's steps are finished and saved{remedy}"
        ) from error
    return folder
