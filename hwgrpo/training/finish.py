"""The end of a run: the final model in Hugging Face format, the kernels that ran, the summary."""

from __future__ import annotations

import json
from pathlib import Path

import hwgrpo_kernels

from hwgrpo.models.loading import save_model
from hwgrpo.models.lora import uses_lora
from hwgrpo.training.loop import Run, Status


def finish(run: Run, status: Status) -> None:
    """Save what a finished or interrupted run leaves, and show the summary.

    With LoRA, `final/` is the merged model and `final-adapter/` the adapter alone.
    """
    output = Path(run.config.trainer.output_dir)
    paths: dict[str, Path] = {}
    if run.strategy.rank == 0:
        (output / "kernels.json").write_text(json.dumps(hwgrpo_kernels.choices(), indent=1), encoding="utf-8")
        if status == "completed" and run.config.trainer.save_final_model:
            paths["model"] = output / "final"
            save_model(run.update.policy.model, run.tokenizer, paths["model"], merge=True)
            if uses_lora(run.config.model.lora):
                paths["adapter"] = output / "final-adapter"
                save_model(run.update.policy.model, run.tokenizer, paths["adapter"], merge=False)
        if (output / "checkpoints").is_dir():
            paths["checkpoint"] = output / "checkpoints"
    run.observer.finish(status, **paths)
    run.strategy.barrier()
