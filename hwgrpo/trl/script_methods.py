"""What scripts call of `GRPOTrainer` beside training: saving, metrics files, callbacks, the accelerator."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from hwgrpo.errors import ConfigError, shown
from hwgrpo.support.file_systems import copy_files
from hwgrpo.trl.grpo_config import note
from hwgrpo.trl.model_card import model_card
from hwgrpo.trl.script_accelerator import ScriptAccelerator
from hwgrpo.trl.trainer_callbacks import Callbacks
from hwgrpo.trl.trainer_parts import TrainerParts
from hwgrpo.trl.trl_errors import MissingName, trl_names

_SCHEDULE = "set optim, learning_rate, lr_scheduler_type and warmup_steps; state.log_history has learning_rate"
_REMEDIES = {
    "optimizer": f"it is sharded with the run: {_SCHEDULE}",
    "lr_scheduler": _SCHEDULE,
    "ref_model": "set beta: above 0 the run has a reference model of its own",
    "model_wrapped": "use trainer.model",
    "tokenizer": "use trainer.processing_class",
}
"""Attribute of TRL's trainer -> what a script does instead."""
_OF_ARGS = (
    *("num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("beta", "num_iterations", "loss_type", "scale_rewards", "importance_sampling_level", "entropy_coef"),
    *("mask_truncated_completions", "top_entropy_quantile", "use_vllm", "vllm_mode", "shuffle_dataset"),
    *("log_completions", "num_completions_to_print"),
)
"""Attributes of TRL's trainer that are arguments."""


class ScriptMethods(TrainerParts):
    """Methods and attributes of a script."""

    is_fsdp_enabled = is_deepspeed_enabled = False
    """Scripts call methods of accelerate's plug-ins where these are set; saving gathers shards without them."""

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
            copy_files(written, Path(folder).expanduser())

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
        self._callbacks.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class, and return it."""
        return self._callbacks.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class."""
        self._callbacks.remove_callback(callback)

    @property
    def control(self) -> Any:
        """Return the control that callbacks see."""
        return self._callbacks.control

    @property
    def callback_handler(self) -> Callbacks:
        """Return the callbacks: `callbacks`, `add_callback`, `pop_callback`, `remove_callback`."""
        return self._callbacks

    @property
    def accelerator(self) -> ScriptAccelerator:
        """Return what scripts read of accelerate's Accelerator: ranks, device, printing, waiting."""
        return ScriptAccelerator(lambda: self._trainer.device)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the rows in their order, the prompts of a generation at once; the run draws its own order."""
        return self._rows(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the rows of an evaluation; None: the constructor's.

        Raises:
            ConfigError: there are none.
        """
        rows = self.eval_dataset if eval_dataset is None else self._evaluation_rows(eval_dataset)
        if rows is None:
            raise ConfigError("get_eval_dataloader: give eval_dataset here, or to the constructor")
        return self._rows(rows)

    def _rows(self, rows: Any) -> DataLoader[Any]:
        return DataLoader(rows, batch_size=self._batches.prompts_per_step, collate_fn=list)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | Sequence[str] | None = None
    ) -> None:
        """Write README.md of the model to output_dir.

        Args:
            model_name: the model's; None: the folder's.
            dataset_name: on the hub; None: not known.
            tags: one, or several.
        """
        if not self.is_world_process_zero():
            return
        folder = Path(str(self.args.output_dir))
        base = self._model if isinstance(self._model, str) else getattr(self._model, "name_or_path", "")
        known = base and "://" not in base and not Path(base).exists()
        further = [tags] if isinstance(tags, str) else tags or []
        text = model_card(model_name or folder.name, base if known else None, dataset_name, further, self._settings)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "README.md").write_text(text, encoding="utf-8")

    @property
    def hub_model_id(self) -> str:
        """Return hub_model_id of the arguments; None there: the name of output_dir."""
        return self.args.hub_model_id or Path(str(self.args.output_dir)).absolute().name

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Print the commands that push the model of the run; nothing is pushed here."""
        adapter = " --adapter" if self._settings.get("model.lora.rank") else ""
        export = f"hwgrpo export{adapter} {self.args.output_dir} FOLDER"
        note(f"push_to_hub: nothing is pushed to the hub; run {export}, then hf upload {self.hub_model_id} FOLDER")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OF_ARGS or "args" not in vars(self):
            super().__setattr__(name, value)
        elif value != (read := getattr(self.args, name)):
            raise ConfigError(
                f"GRPOTrainer.{name}={shown(value)}: the run has {name}={shown(read)} of args; set it in GRPOConfig"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _OF_ARGS and "args" in vars(self):
            return getattr(self.args, name)
        remedy = _REMEDIES.get(name, "docs/from-trl.md lists the methods that there are")
        raise MissingName(f"GRPOTrainer.{name} of TRL has no counterpart here; {remedy}")
