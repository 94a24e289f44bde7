"""`GRPOTrainer`: TRL's trainer, with `hwgrpo.Trainer` underneath."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import TrainerState
from transformers.trainer_utils import TrainOutput

from hwgrpo.errors import ConfigError, RunError, RunFinished, nearest, shown
from hwgrpo.imports.trl_import import import_trl
from hwgrpo.imports.trl_settings import TrlSettings
from hwgrpo.trainer import Step, Trainer
from hwgrpo.trl.grpo_config import GRPOConfig, note
from hwgrpo.trl.peft_settings import check_model, lora_settings, quantize_setting
from hwgrpo.trl.reward_callables import RewardCallables
from hwgrpo.trl.trainer_callbacks import Callbacks
from hwgrpo.trl.trl_datasets import evaluation_rows, longest_prompt, rows_of
from hwgrpo.trl.trl_metrics import LogWindow, named, named_validation

_TUTORIALS = {
    **dict.fromkeys(("reward_function", "reward_functions", "reward_fn"), "reward_funcs"),
    "tokenizer": "processing_class",
    "config": "args",
}
"""Arguments that no TRL version has, or that earlier ones had -> the argument."""
_REFUSED = {
    "tools": ("a model calls no tools here", "a reward function that reads the response"),
    "environment_factory": ("there are no environments here", "a reward function that reads the response"),
    "rollout_func": ("responses are sampled by the engine", "rollout.source=FILE.py:FUNCTION of hwgrpo train"),
}

_NEVER_CALLED = (
    *("compute_loss", "_compute_loss", "_generate_and_score_completions", "_calculate_rewards", "_generate"),
    *("training_step", "prediction_step", "evaluation_loop", "_get_per_token_logps_and_entropies", "_prepare_inputs"),
    *("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "create_model_card"),
    *("get_train_dataloader", "get_eval_dataloader", "_get_train_sampler", "_get_eval_sampler", "compute_metrics"),
    *("_inner_training_loop", "_save_checkpoint", "_maybe_log_save_evaluate", "optimizer_step"),
)
"""Methods of TRL's trainer that nothing calls here."""


class GRPOTrainer:
    """TRL's GRPOTrainer: the same arguments, methods and log history.

    Args:
        model: a name, a folder, or a causal language model of transformers.
        reward_funcs: reward functions of TRL's or verl's signature, names of reward models, models; or a list of these.
        args: a GRPOConfig; None: its defaults.
        train_dataset: rows with a column `prompt`; an iterable dataset needs max_steps.
        eval_dataset: the same for evaluation, or a mapping of several.
        processing_class: the model's tokenizer; None: the one of its name.
        reward_processing_classes: a tokenizer of each reward model given as an object.
        callbacks: transformers' callbacks; on_substep_end and on_pre_optimizer_step are not called.
        optimizers: (None, None); the optimizer is that of the arguments.
        quantization_config: a BitsAndBytesConfig, with peft_config.
        peft_config: a LoraConfig.
        tools, rollout_func, environment_factory: None.
        **others: names of tutorials for these, read with a notice.

    Raises:
        ConfigError, DataError: an argument, its value, the reason and the remedy.
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        **others: Any,
    ) -> None:
        overridden = next((name for name in _NEVER_CALLED if hasattr(type(self), name)), None)
        if overridden is not None:
            raise ConfigError(
                f"{type(self).__name__}.{overridden} would never be called: hwgrpo has its own training loop; give a "
                "loss, an advantage or a reward as a function of hwgrpo (docs/extend.md)"
            )
        named_here = _renamed(others)
        reward_funcs = named_here.get("reward_funcs", reward_funcs)
        processing_class = named_here.get("processing_class", processing_class)
        args = named_here.get("args", args)
        _refuse({"tools": tools, "rollout_func": rollout_func, "environment_factory": environment_factory})
        if any(each is not None for each in optimizers):
            raise ConfigError(
                "optimizers: the optimizer is sharded and saved with the run, and is none of yours; set optim, "
                "learning_rate, lr_scheduler_type and warmup_steps"
            )
        if model is None:
            raise ConfigError("model is missing: give a name, a folder, or a model of transformers")
        self.args = GRPOConfig() if args is None else args
        if not isinstance(self.args, GRPOConfig):
            raise ConfigError(
                f"args={type(self.args).__name__} is not hwgrpo.trl.GRPOConfig; import it from hwgrpo.trl"
            )
        kwargs = dict(self.args.model_init_kwargs) if isinstance(self.args.model_init_kwargs, Mapping) else {}
        if kwargs.get("quantization_config") is not None:
            quantization_config = kwargs.pop("quantization_config")
            self.args.model_init_kwargs = kwargs
        self.state = TrainerState(is_world_process_zero=self.is_world_process_zero())
        if processing_class is not None and not callable(processing_class):
            raise ConfigError(f"processing_class={shown(processing_class)} is no tokenizer; give the object")
        self._model, self.processing_class = model, processing_class
        self._rewards = RewardCallables(reward_funcs, reward_processing_classes, lambda: self.state)
        settings = self.args.settings()
        steps = settings["max_steps"]
        batches = settings.batches()
        taken = math.ceil(steps / batches.updates_per_step) * batches.prompts_per_step if steps > 0 else None
        if train_dataset is None:
            raise ConfigError("train_dataset is missing: give rows with a column prompt")
        self.train_dataset = rows_of(train_dataset, "train_dataset", taken)
        self.eval_dataset = evaluation_rows(eval_dataset)
        if settings["eval_strategy"] != "no" and self.eval_dataset is None:
            raise ConfigError(f"eval_strategy={settings['eval_strategy']} needs eval_dataset")
        if not isinstance(model, str):
            check_model(model)
        adapters = lora_settings(peft_config, self._model_type())
        self._settings = {
            **self._imported(settings),
            **adapters,
            **quantize_setting(quantization_config, adapters=bool(adapters)),
        }
        self._batches = batches
        self._callbacks = Callbacks(callbacks, self.args, self.state, self._objects)
        self._window = LogWindow()
        self._opened = False
        self._notes_epoch_stop = True
        self._resume = "never"
        self._trainer = self._make(self._resume)
        self._callbacks.call("on_init_end")

    def _imported(self, settings: TrlSettings) -> dict[str, Any]:
        """Return the settings here.

        Raises:
            ConfigError: arguments without a counterpart, all of them.
        """
        reads_length = settings["max_prompt_length"] is None and settings["vllm_max_model_length"] is None
        tokenizer, longest = self._tokenizer(), None
        if tokenizer is not None and reads_length:
            datasets = [each for each in (self.train_dataset, self.eval_dataset) if each is not None]
            longest = longest_prompt(datasets, tokenizer, settings["chat_template_kwargs"] or {})
        evaluates = self.eval_dataset is not None
        imported = import_trl(
            self.args.settings(prompts=len(self.train_dataset), longest_prompt=longest, evaluates=evaluates)
        )
        refused = [f"{each.key}={shown(each.value)}: {each.note}" for each in imported.refused()]
        if refused:
            raise ConfigError("GRPOConfig: " + "; ".join(refused))
        for entry in imported.entries:
            if entry.group == "ignored" and entry.note and entry.key in self.args.given_names():
                note(f"{entry.key}={shown(entry.value)}: {entry.note}")
        return imported.settings

    def _make(self, resume: str) -> Trainer:
        """Return the run underneath; the model is loaded at its first use."""
        settings = {**self._settings, "trainer.resume": resume}
        validates = settings.pop("data.validation", None) is not None
        model = self._model
        if isinstance(model, str):
            settings["model.path"] = model
        trainer = Trainer(
            settings,
            model=None if isinstance(model, str) else model,
            tokenizer=self.processing_class,
            train_data=self.train_dataset,
            validation_data=self.eval_dataset if validates else None,
            rewards=self._rewards.weigh(self.args.reward_weights),
        )
        # without validations it is no setting that load_config accepts, but evaluate() reads it
        trainer.config.trainer.validation_n = self.args.num_generations_eval or self.args.num_generations or 8
        return trainer

    def train(self, resume_from_checkpoint: str | bool | None = None, **unused: Any) -> TrainOutput:
        """Train; return the number of updates, the mean loss and the figures of the run.

        Args:
            resume_from_checkpoint: True: the newest checkpoint of output_dir; a folder: this one; None: from the start.
            **unused: trial and ignore_keys_for_eval, without meaning here.

        Raises:
            ConfigError: the folder has another run, or there is no such checkpoint.
        """
        resume = {None: "never", False: "never", True: "auto"}.get(resume_from_checkpoint, resume_from_checkpoint)  # type: ignore[arg-type]
        if resume == "never":
            self._check_folder()
        if resume == "auto" and not _has_run(self.args.output_dir):
            note(f"resume_from_checkpoint: {self.args.output_dir} has no checkpoint; training starts from step 0")
            resume = self._resume
        if resume != self._resume:
            self.close()
            self._trainer, self._resume = self._make(str(resume)), str(resume)
        trainer, started = self._opened_trainer(), time.monotonic()
        try:
            trainer.total_steps  # noqa: B018  # opens the run
        except RunError as error:
            if isinstance(error.__cause__, RunFinished):
                return self._finished()
            raise
        first = trainer.step * self._batches.updates_per_step
        self.state.max_steps = trainer.total_steps * self._batches.updates_per_step
        self.state.num_train_epochs = math.ceil(self._epoch(trainer.total_steps))
        self.state.global_step, self.state.epoch = first, self._epoch(trainer.step)
        self.state.logging_steps, self.state.save_steps = self.args.logging_steps, self.args.save_steps  # type: ignore[assignment]
        self._callbacks.control._new_training()
        self._callbacks.call("on_train_begin")
        try:
            losses = self._steps(trainer)
        finally:
            self.close()  # an exception of a callback may be kept, with all that it refers to
        seconds = time.monotonic() - started
        loss = sum(losses) / len(losses) if losses else 0.0
        updates = self.state.global_step - first
        figures = {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(updates * self._completions_per_update() / seconds, 3),
            "train_steps_per_second": round(updates / seconds, 3),
            "train_loss": loss,
        }
        self.log(figures)
        self._callbacks.call("on_train_end")
        return TrainOutput(self.state.global_step, loss, {**figures, "epoch": self.state.epoch})

    def _finished(self) -> TrainOutput:
        """Return the result of a run that has no steps left."""
        note(f"output_dir={self.args.output_dir!r} is finished; nothing was trained. max_steps continues it")
        updates = self.args.settings(prompts=len(self.train_dataset)).total_updates() or 0
        self.state.global_step = self.state.max_steps = updates
        return TrainOutput(updates, 0.0, {"train_runtime": 0.0, "train_loss": 0.0})

    def _check_folder(self) -> None:
        """Raise ConfigError if output_dir has a run that is to be trained from the start."""
        if _has_run(self.args.output_dir) and not self._trainer.is_open:
            raise ConfigError(
                f"output_dir={self.args.output_dir!r} contains a run, which TRL would overwrite; continue it with "
                "train(resume_from_checkpoint=True), remove it, or give another output_dir"
            )

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
                self._evaluated(trainer.validations[0])
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
        return losses

    def _count(self, step: Step) -> dict[str, float]:
        """Add a step to the state and to the next log; return its metrics under TRL's names."""
        updates = self._batches.updates_per_step
        self.state.global_step = step.step * updates
        self.state.epoch = self._epoch(step.step)
        self.state.num_input_tokens_seen += int(step.metrics.get("perf/total_num_tokens", 0))
        values = named(step.metrics) | {"num_tokens": float(self.state.num_input_tokens_seen)}
        logged, self._rewards.logged = self._rewards.logged, {}
        values |= {name: sum(each) / len(each) for name, each in logged.items()}
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
            self._evaluated(step.validation)
        elif control.should_evaluate:
            self.evaluate()
        if control.should_save and step.saved is None:
            trainer.save_checkpoint()
        if control.should_save or step.saved is not None:
            self._callbacks.call("on_save")

    def log(self, logs: Mapping[str, float], start_time: float | None = None) -> None:
        """Add metrics to `state.log_history`, with epoch and step, and call on_log."""
        del start_time
        values = dict(logs)
        if self.state.epoch is not None:
            values["epoch"] = self.state.epoch
        self.state.log_history.append({**values, "step": self.state.global_step})
        self._callbacks.call("on_log", logs=values)

    def _evaluated(self, metrics: Mapping[str, float], prefix: str = "eval") -> dict[str, float]:
        values = named_validation(metrics)
        if prefix != "eval":
            values = {f"{prefix}{name.removeprefix('eval')}": value for name, value in values.items()}
        self.log(values)
        self._callbacks.call("on_evaluate", metrics=values)
        self._note_best(values)
        return values

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        """Set the best metric of the state after an evaluation, as transformers does."""
        name = self.args.metric_for_best_model
        if name is None:
            return
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ConfigError(f"metric_for_best_model={name!r} is no metric; there are: {', '.join(metrics)}")
        value, best = metrics[name], self.state.best_metric
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the metrics of an evaluation; they are logged, too.

        Args:
            eval_dataset: rows, or a mapping of several; None: the constructor's.
            ignore_keys: without meaning here.
            metric_key_prefix: first part of the names.

        Raises:
            ConfigError: there is no dataset.
        """
        del ignore_keys
        rows = self.eval_dataset if eval_dataset is None else evaluation_rows(eval_dataset)
        if rows is None:
            raise ConfigError("evaluate: give eval_dataset here, or to the constructor")
        metrics = self._opened_trainer().evaluate(rows)
        return self._evaluated(metrics, metric_key_prefix) | {"epoch": self.state.epoch or 0.0}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in Hugging Face format; with peft_config the adapter alone, as TRL does.

        Args:
            output_dir: the folder; None: output_dir of the arguments.
        """
        del _internal_call
        folder, trainer = output_dir or str(self.args.output_dir), self._opened_trainer()
        name = "final-adapter" if self._settings.get("model.lora.rank") else "final"
        written = Path(str(self.args.output_dir)) / name
        if self.args.world_size == 1 or trainer.is_open or not written.is_dir():
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

    def end(self) -> None:
        """Close the run, as `close` does."""
        self.close()

    def close(self) -> None:
        """Close the run, so that another may start; harmless if it is closed."""
        self._trainer.close()

    def is_world_process_zero(self) -> bool:
        """Return whether this is the process that writes."""
        return os.environ.get("RANK", "0") == "0"

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first process of its host."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    @property
    def control(self) -> Any:
        """Return the control that callbacks see."""
        return self._callbacks.control

    @property
    def model(self) -> Any:
        """Return the policy; before training, a model that was given as an object is that object."""
        if not self._opened and not isinstance(self._model, str):
            return self._model
        return self._opened_trainer().model

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

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings here that follow from the arguments."""
        return dict(self._settings)

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

    def _opened_trainer(self) -> Trainer:
        """Return the run underneath, which a caller is about to open."""
        if not self._opened and self._resume == "never":
            self._check_folder()
        self._opened = True
        return self._trainer

    def _objects(self) -> dict[str, Any]:
        """Return what callbacks get by name."""
        model = self._model if not self._opened else self._trainer.model
        tokenizer = self.processing_class if not self._opened else self._trainer.tokenizer
        return {
            "model": model,
            "processing_class": tokenizer,
            "optimizer": None,
            "lr_scheduler": None,
            "train_dataloader": None,
            "eval_dataloader": None,
        }

    def _tokenizer(self) -> Any:
        """Return the tokenizer of the prompts, None for a model that is made by its name."""
        if self.processing_class is not None:
            return self.processing_class
        name = self._model if isinstance(self._model, str) else getattr(self._model, "name_or_path", "")
        if not name or name.startswith("builtin://"):
            return None
        from transformers import AutoTokenizer

        code = self.args.trust_remote_code
        self.processing_class = AutoTokenizer.from_pretrained(name, trust_remote_code=code)
        return self.processing_class

    def _model_type(self) -> str | None:
        if not isinstance(self._model, str):
            return getattr(self._model.config, "model_type", None)
        if self._model.startswith("builtin://"):
            return None
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self._model, trust_remote_code=self.args.trust_remote_code).model_type

    def _epoch(self, step: int) -> float:
        return step * self._batches.prompts_per_step / len(self.train_dataset)

    def _completions_per_update(self) -> int:
        return self._batches.prompts_per_update * (self.args.num_generations or 1)


def _renamed(others: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of other names under their names.

    Raises:
        ConfigError: an unknown one.
    """
    known = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class", "peft_config")
    result = {}
    for name, value in others.items():
        if name not in _TUTORIALS:
            near = nearest(name, [*known, *_TUTORIALS, *_REFUSED, "callbacks", "optimizers", "quantization_config"])
            raise ConfigError(f"GRPOTrainer: unknown argument {name}" + (f": did you mean {near}?" if near else ""))
        result[_TUTORIALS[name]] = value
        note(f"GRPOTrainer: TRL has no argument {name}; it is read as {_TUTORIALS[name]}")
    return result


def _refuse(given: Mapping[str, Any]) -> None:
    """Raise ConfigError if an argument without a counterpart is given."""
    for name, value in given.items():
        if value is not None:
            why, instead = _REFUSED[name]
            raise ConfigError(f"{name} is not supported: {why}; instead: {instead}")


def _has_run(folder: Any) -> bool:
    """Return whether a folder contains a run."""
    return any((Path(str(folder)) / name).exists() for name in ("metrics.jsonl", "checkpoints"))
