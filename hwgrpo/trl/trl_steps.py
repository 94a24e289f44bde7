"""The steps of a run of `GRPOTrainer`: callbacks, log, evaluations and checkpoints between them."""

from __future__ import annotations

import math
from pathlib import Path

from hwgrpo.trainer import Step, Trainer
from hwgrpo.training.checkpoint.checkpoint_files import folder_of as step_folder
from hwgrpo.trl import trl_checkpoints
from hwgrpo.trl.grpo_config import note
from hwgrpo.trl.trl_evaluation import Evaluation
from hwgrpo.trl.trl_metrics import named


class TrainingSteps(Evaluation):
    """Trains the steps of a run and calls the callbacks."""

    _notes_epoch_stop = True

    def _steps(self, trainer: Trainer) -> list[float]:
        """Train the steps of a run and call the callbacks; return the losses."""
        losses, steps = [], iter(trainer)
        control = self._callbacks.control
        control = self._callbacks.call("on_epoch_begin")
        while True:
            control._new_step()
            if trainer.step < trainer.total_steps and not control.should_training_stop:
                control = self._callbacks.call("on_step_begin")
            step = next(steps, None)
            if step is None:
                break
            if step.step == 1 and 0 in trainer.validations:
                self._evaluated(trainer.validations[0], by_name=self._evaluates_by_name)
            epoch = math.floor(self.state.epoch or 0)
            values = self._count(step)
            losses += [values["loss"]] if "loss" in values else []
            control = self._callbacks.call("on_step_end")
            if math.floor(self.state.epoch or 0) > epoch:
                control = self._callbacks.call("on_epoch_end")
                if step.step < trainer.total_steps:
                    control = self._callbacks.call("on_epoch_begin")
            self._after_step(trainer, step)
            control = self._callbacks.control
            if control.should_epoch_stop and self._notes_epoch_stop:
                note("control.should_epoch_stop is ignored: an epoch has no early end here; use should_training_stop")
                self._notes_epoch_stop = False
            if control.should_training_stop:
                trainer.stop()
        if trainer.step < trainer.total_steps and self.is_world_process_zero():  # a stop saves after its last step
            output = Path(str(self.args.output_dir))
            trl_checkpoints.write_state(output, step_folder(output / "checkpoints", trainer.step), self.state)
        return losses

    def _count(self, step: Step) -> dict[str, float]:
        """Add a step to the state and to the next log; return its metrics under TRL's names."""
        updates = self._batches.updates_per_step
        self.state.global_step = step.step * updates
        self.state.epoch = self._epoch(step.step)
        self.state.num_input_tokens_seen += int(step.metrics.get("perf/total_num_tokens", 0))
        loss = self._settings.get("algorithm.loss.name", "ppo_clip")
        values = named(step.metrics, self._rewards.shown, loss)
        values["num_tokens"] = float(self.state.num_input_tokens_seen)
        values |= {name: sum(each) / len(each) for name, each in self._rewards.pop_logged().items()}
        self._window.add(values)
        return values

    def _after_step(self, trainer: Trainer, step: Step) -> None:
        """Log, evaluate and save what is due after a step."""
        control, settings = self._callbacks.control, self._settings
        every = settings.get("observe.log_every", 1)
        logs = self.args.logging_strategy != "no" and (step.step % every == 0 or step.step == trainer.total_steps)
        if logs or control.should_log or (self.args.logging_first_step and step.step == 1):
            self.log(self._window.take())
        if step.validation is not None and self.args.eval_strategy != "no":
            self._evaluated(step.validation, by_name=self._evaluates_by_name)
        elif control.should_evaluate:
            self.evaluate()
        saved = step.saved
        if control.should_save and saved is None:
            saved = trainer.save_checkpoint()
        if saved is not None:
            self._note_checkpoint(trainer, saved)
            self._callbacks.call("on_save")

    def _note_checkpoint(self, trainer: Trainer, saved: Path) -> None:
        """Write `checkpoint-N`; for a callback with on_save, wait for the checkpoint and write the model there, too."""
        output = Path(str(self.args.output_dir))
        if self.is_world_process_zero():
            trl_checkpoints.write_state(output, saved, self.state)
        if self._callbacks.overrides("on_save"):
            trainer.save_checkpoint()
            trainer.save_model(trl_checkpoints.folder_of(output, self.state.global_step), merge=False)

    def _epoch(self, step: int) -> float:
        return step * self._batches.prompts_per_step / len(self.train_dataset)
