"""What the parts of `GRPOTrainer` share: its arguments, state, callbacks and log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState

from hwgrpo.migrate.imports.trl_settings import Batches
from hwgrpo.support.launched_ranks import launched_rank
from hwgrpo.trainer import Trainer
from hwgrpo.trl.grpo_config import GRPOConfig
from hwgrpo.trl.reward_callables import RewardCallables
from hwgrpo.trl.trainer_callbacks import Callbacks
from hwgrpo.trl.trl_agents import Agents
from hwgrpo.trl.trl_datasets import evaluation_rows
from hwgrpo.trl.trl_metrics import LogWindow


class TrainerParts:
    """Attributes of a trainer, and its log."""

    args: GRPOConfig
    state: TrainerState
    processing_class: Any
    train_dataset: Any
    eval_dataset: Any
    _evaluates_by_name: bool
    _model: Any
    _rewards: RewardCallables
    _agents: Agents | None
    _settings: dict[str, Any]
    _batches: Batches
    _callbacks: Callbacks
    _window: LogWindow
    _trainer: Trainer
    _opened: bool
    _is_finished: bool

    def _opened_trainer(self) -> Trainer:
        """Return the run underneath, which a caller is about to open."""
        raise NotImplementedError

    def _final_folder(self) -> Path:
        """Return where an ended run has its model; with peft_config, the adapter."""
        name = "final-adapter" if self._settings.get("model.lora.rank") else "final"
        return Path(str(self.args.output_dir)) / name

    def _evaluation_rows(self, dataset: Any) -> Any:
        """Return the rows of a dataset for evaluation; environments may give their prompts."""
        return evaluation_rows(dataset, needs_prompt=self._agents is None or not self._agents.has_environments)

    def log(self, logs: Mapping[str, float], start_time: float | None = None) -> None:
        """Add metrics to `state.log_history`, with epoch and step, and call on_log."""
        del start_time
        values = dict(logs)
        if self.state.epoch is not None:
            values["epoch"] = self.state.epoch
        self.state.log_history.append({**values, "step": self.state.global_step})
        self._callbacks.call("on_log", logs=values)

    def is_world_process_zero(self) -> bool:
        """Return whether this is the process that writes."""
        return launched_rank().rank == 0

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first process of its host."""
        return launched_rank().local_rank == 0
