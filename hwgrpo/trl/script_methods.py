"""What scripts call of `GRPOTrainer` beside training: saving, metrics files, callbacks, the accelerator."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hwgrpo.errors import ConfigError
from hwgrpo.trl.trainer_parts import TrainerParts
from hwgrpo.trl.trl_errors import trl_names


class ScriptMethods(TrainerParts):
    """Methods and attributes of a script."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in Hugging Face format; with peft_config the adapter alone, as TRL does.

        Args:
            output_dir: the folder; None: output_dir of the arguments.
        """
        del _internal_call
        folder, written = output_dir or str(self.args.output_dir), self._final_folder()
        has_model = not self._is_finished and (self.args.world_size == 1 or self._trainer.is_open)
        if has_model or not written.is_dir():
            trainer = self._opened_trainer()
            with trl_names():
                trainer.save_model(folder, merge=False)
        elif self.is_world_process_zero():  # the ranks of an ended run have no common model; this is its last one
            shutil.copytree(written, folder, dirs_exist_ok=True)

    def save_state(self) -> None:
        """Write the state as trainer_state.json."""
        if self.is_world_process_zero():
            self.state.save_to_json(str(Path(str(self.args.output_dir)) / "trainer_state.json"))

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Print metrics."""
        if self.is_world_process_zero():
            print(f"***** {split} metrics *****")
            for name, value in metrics.items():
                print(f"  {name} = {value}")

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Write metrics as SPLIT_results.json; `combined` has no meaning here."""
        del combined
        if self.is_world_process_zero():
            file = Path(str(self.args.output_dir)) / f"{split}_results.json"
            file.write_text(json.dumps(dict(metrics), indent=4, sort_keys=True), encoding="utf-8")

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or an object of a class of callbacks."""
        self._callbacks.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class, and return it."""
        return self._callbacks.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class."""
        self._callbacks.pop(callback)

    @property
    def control(self) -> Any:
        """Return the control that callbacks see."""
        return self._callbacks.control

    @property
    def accelerator(self) -> Any:
        """Return what scripts read of accelerate's Accelerator: the rank, and printing on rank 0."""
        first = self.is_world_process_zero()
        return SimpleNamespace(
            is_main_process=first,
            is_local_main_process=self.is_local_process_zero(),
            process_index=int(os.environ.get("RANK", "0")),
            num_processes=int(os.environ.get("WORLD_SIZE", "1")),
            print=lambda *values, **more: print(*values, **more) if first else None,
            unwrap_model=lambda model, **_: model,
        )

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Refuse to write to the hub.

        Raises:
            ConfigError: always; the message has the command.
        """
        raise ConfigError("push_to_hub: the hub is not written to; use save_model(FOLDER), then hf upload NAME FOLDER")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"GRPOTrainer.{name} of TRL has no counterpart here; docs/from-trl.md lists the methods that there are"
        )
