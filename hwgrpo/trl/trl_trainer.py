"""`GRPOTrainer`: TRL's trainer, with `hwgrpo.Trainer` underneath."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import ProcessorMixin, TrainerState
from transformers.trainer_utils import TrainOutput

from hwgrpo.config.schema import ModelConfig
from hwgrpo.data.chat_template import unread_options
from hwgrpo.data.given_rows import part_of
from hwgrpo.data.image_prompts import ImagePrompts
from hwgrpo.errors import ConfigError, RunError, RunFinished, shown
from hwgrpo.migrate.imports.trl_import import import_trl
from hwgrpo.migrate.imports.trl_settings import TrlSettings
from hwgrpo.migrate.tables.trl_names import TRL
from hwgrpo.models.placeholders import reads_images
from hwgrpo.trainer import Trainer
from hwgrpo.trl import trl_checkpoints
from hwgrpo.trl.grpo_config import FIELDS, GRPOConfig, note
from hwgrpo.trl.peft_settings import check_model, lora_settings, quantize_setting
from hwgrpo.trl.reward_callables import ENVIRONMENTS, RewardCallables
from hwgrpo.trl.script_methods import ScriptMethods
from hwgrpo.trl.trainer_arguments import check_overrides, refuse, renamed
from hwgrpo.trl.trainer_callbacks import Callbacks
from hwgrpo.trl.trl_agents import Agents
from hwgrpo.trl.trl_datasets import longest_prompt, rows_of
from hwgrpo.trl.trl_errors import trl_names
from hwgrpo.trl.trl_metrics import LogWindow
from hwgrpo.trl.trl_steps import TrainingSteps
from hwgrpo.trl.vision_models import check_image_processor, longest_with_images, tokenizer_of, vision_settings
from hwgrpo.trl.wrapped_model import copy_adapter, unwrap

TEMPLATE_OPTIONS = "data.chat_template_kwargs"


class GRPOTrainer(TrainingSteps, ScriptMethods):
    """TRL's GRPOTrainer: the same arguments, methods and log history.

    Args:
        model: a name, a folder, or a causal language model of transformers, also one that `get_peft_model` has wrapped.
        reward_funcs: reward functions of TRL's or verl's signature, names of reward models, models; or a list of these.
        args: a GRPOConfig; None: its defaults, with output_dir `MODEL-GRPO`.
        train_dataset: rows with a column `prompt`; an iterable dataset needs max_steps.
        eval_dataset: the same for evaluation, or a mapping of several.
        processing_class: the model's tokenizer, or the processor of a model that reads images; None: the tokenizer of
            its name.
        reward_processing_classes: a tokenizer of each reward model given as an object.
        callbacks: transformers' callbacks; on_substep_end and on_pre_optimizer_step are not called.
        optimizers: (None, None); the optimizer is that of the arguments.
        quantization_config: a BitsAndBytesConfig, with peft_config.
        peft_config: a LoraConfig.
        tools: functions that the policy may call, sync or async.
        rollout_func: None.
        environment_factory: makes an environment with `reset`, methods that the policy calls, and perhaps `get_reward`;
            or a mapping of several, among which the column `environment` chooses.
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
        check_overrides(type(self), GRPOTrainer)
        named_here = renamed(others)
        reward_funcs = named_here.get("reward_funcs", reward_funcs)
        processing_class = named_here.get("processing_class", processing_class)
        args = named_here.get("args", args)
        refuse({"rollout_func": rollout_func})
        has_agents = bool(tools) or environment_factory is not None
        self._agents = Agents(tools, environment_factory) if has_agents else None
        if any(each is not None for each in optimizers):
            raise ConfigError(
                "optimizers: the optimizer is sharded and saved with the run, and is none of yours; set optim, "
                "learning_rate, lr_scheduler_type and warmup_steps"
            )
        if model is None:
            raise ConfigError("model is missing: give a name, a folder, or a model of transformers")
        self.args = GRPOConfig(_default_folder(model)) if args is None else args
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
        self._text: Any = processing_class  # the tokenizer
        if isinstance(processing_class, ProcessorMixin):
            self._text = tokenizer_of(processing_class)
        self._model, self._wrapped, self.processing_class = model, None, processing_class
        settings = self.args.settings()
        steps = settings["max_steps"]
        batches = settings.batches()
        taken = math.ceil(steps / batches.updates_per_step) * batches.prompts_per_step if steps > 0 else None
        if train_dataset is None:
            environment = environment_factory is not None
            which = ", or with columns by which reset makes one, the same in each call" if environment else ""
            raise ConfigError(f"train_dataset is missing: give rows with a column prompt{which}")
        opens = environment_factory is not None
        self.train_dataset = rows_of(train_dataset, "train_dataset", taken, needs_prompt=not opens)
        self.eval_dataset = self._evaluation_rows(eval_dataset)
        if self._agents is not None:
            for name, rows in (("train_dataset", self.train_dataset), ("eval_dataset", self.eval_dataset)):
                self._agents.check_rows(rows or (), name)
            reward_funcs = [*([] if reward_funcs is None else _listed(reward_funcs)), *self._agents.rewards]
            if isinstance(reward_processing_classes, list | tuple):
                reward_processing_classes = [*reward_processing_classes, *[None] * len(self._agents.rewards)]
            if not reward_funcs:
                raise ConfigError(
                    "reward_funcs is missing: give a function, or an environment_factory whose class has get_reward"
                )
        self._evaluates_by_name = isinstance(eval_dataset, Mapping)
        self._rewards = RewardCallables(
            reward_funcs,
            reward_processing_classes,
            lambda: self.state,
            options=settings["chat_template_kwargs"],
            conversations=has_agents or not isinstance(self.train_dataset[0]["prompt"], str),
            device=lambda: self._trainer.device,
        )
        columns = part_of(self.train_dataset, "train_dataset", "train_dataset").columns
        reads = (ENVIRONMENTS,) if self._agents is not None and self._agents.has_environments else ()
        self._rewards.check_columns((*columns, *reads))
        if settings["eval_strategy"] != "no" and self.eval_dataset is None:
            raise ConfigError(f"eval_strategy={settings['eval_strategy']} needs eval_dataset")
        if not isinstance(model, str):
            check_model(model)
            self._model, adapters = unwrap(model, peft_config, Path(str(self.args.output_dir)))
            self._wrapped = model if self._model is not model else None
        else:
            adapters = lora_settings(peft_config, self._model_type())
        self._images = self._image_prompts()
        self._settings = {
            **self._imported(settings),
            **adapters,
            **self._vision_settings(adapted=bool(adapters)),
            **quantize_setting(quantization_config, adapters=bool(adapters)),
        }
        self._batches = batches
        self._callbacks = Callbacks(callbacks, self.args, self.state, self._objects)
        self._window = LogWindow()
        self._opened = self._trained = self._is_finished = False
        self._resume = "never"
        self._trainer = self._make(self._resume)
        self._read = {name: getattr(self.args, name) for name in FIELDS}
        self._read_data = {name: getattr(self, name) for name in ("train_dataset", "eval_dataset")}
        self._callbacks.call("on_init_end")

    def _imported(self, settings: TrlSettings) -> dict[str, Any]:
        """Return the settings here.

        Raises:
            ConfigError: arguments without a counterpart, all of them.
        """
        reads_length = settings["max_prompt_length"] is None and settings["vllm_max_model_length"] is None
        tokenizer, longest = self._tokenizer(), None
        if self._agents is not None and tokenizer is not None:
            self._agents.check_template(tokenizer)
        if tokenizer is not None and reads_length:
            datasets = [each for each in (self.train_dataset, self.eval_dataset) if each is not None]
            options = settings["chat_template_kwargs"] or {}
            if self._images is not None and self._agents is None:
                longest = longest_with_images(datasets, tokenizer, options, self._images)
            else:
                longest = longest_prompt(datasets, tokenizer, options, self._agents)
        evaluates = self.eval_dataset is not None
        imported = import_trl(
            self.args.settings(
                prompts=len(self.train_dataset),
                longest_prompt=longest,
                evaluates=evaluates,
                agents=self._agents is not None,
            )
        )
        refused = [f"{each.key}={shown(each.value)}: {each.note}" for each in imported.refused()]
        if refused:
            raise ConfigError("GRPOConfig: " + "; ".join(refused))
        for entry in imported.entries:
            if entry.group == "ignored" and entry.note and entry.key in self.args.given_names():
                note(f"{entry.key}={shown(entry.value)}: {entry.note}")
        return imported.settings | ({} if self._agents is None else self._agents.settings)

    def _weights(self) -> list[float] | None:
        """Return the weights of the reward functions; those of environments have the weight 1, as in TRL."""
        if self.args.reward_weights is None or self._agents is None:
            return self.args.reward_weights
        return [*self.args.reward_weights, *[1.0] * len(self._agents.rewards)]

    def _make(self, resume: str) -> Trainer:
        """Return the run underneath; the model is loaded at its first use."""
        settings = {**self._settings, "trainer.resume": resume}
        validates = settings.pop("data.validation", None) is not None
        model = self._model
        if isinstance(model, str):
            settings["model.path"] = model
        template, options = getattr(self._tokenizer(), "chat_template", None), settings.get(TEMPLATE_OPTIONS)
        if template and options:  # those that only a reward model's template reads, or none, have no effect in TRL
            unread = unread_options(options, template)
            settings[TEMPLATE_OPTIONS] = {name: value for name, value in options.items() if name not in unread}
        with trl_names():
            trainer = Trainer(
                settings,
                model=None if isinstance(model, str) else model,
                tokenizer=self._text,
                train_data=self.train_dataset,
                validation_data=self.eval_dataset if validates else None,
                rewards=self._rewards.weigh(self._weights()),
                environments=None if self._agents is None else self._agents.environments,
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
        self._check_unchanged()
        if isinstance(resume_from_checkpoint, bool | None):
            resume = "auto" if resume_from_checkpoint else "never"
        else:
            resume = trl_checkpoints.resolve(str(resume_from_checkpoint))
        if resume == "never":
            self._check_folder()
        if resume == "auto" and not _has_run(self.args.output_dir):
            note(f"resume_from_checkpoint: {self.args.output_dir} has no checkpoint; training starts from step 0")
            resume = self._resume
        if resume != self._resume or self._trained:
            self.close()
            self._trainer, self._resume, self._is_finished = self._make(resume), resume, False
        trainer, started = self._opened_trainer(), time.monotonic()
        self._trained, self._window = True, LogWindow()
        try:
            with trl_names():
                trainer.total_steps  # noqa: B018  # opens the run
        except RunError as error:
            if isinstance(error.__cause__, RunFinished):
                return self._finished()
            raise
        first = trainer.step * self._batches.updates_per_step
        if first:
            output = Path(str(self.args.output_dir))
            runs = [output] if resume == "auto" else [Path(resume).absolute().parents[1], output]
            trl_checkpoints.restore_state(self.state, runs, first)
        self.state.max_steps = trainer.total_steps * self._batches.updates_per_step
        self.state.num_train_epochs = math.ceil(self._epoch(trainer.total_steps))
        self.state.global_step, self.state.epoch = first, self._epoch(trainer.step)
        self.state.logging_steps, self.state.save_steps = self.args.logging_steps, self.args.save_steps  # type: ignore[assignment]
        self._callbacks.control._new_training()
        self._callbacks.call("on_train_begin")
        try:
            with trl_names():
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
        if self._wrapped is not None and self._final_folder().is_dir():
            copy_adapter(self._final_folder(), self._wrapped)
        self.log(figures)
        self._callbacks.call("on_train_end")
        return TrainOutput(self.state.global_step, loss, {**figures, "epoch": self.state.epoch})

    def _finished(self) -> TrainOutput:
        """Return the result of a run that has no steps left."""
        note(f"output_dir={self.args.output_dir!r} is finished; nothing was trained. max_steps continues it")
        updates = self.args.settings(prompts=len(self.train_dataset)).total_updates() or 0
        self._is_finished = True
        self.state.global_step = self.state.max_steps = updates
        trl_checkpoints.restore_state(self.state, [Path(str(self.args.output_dir))], updates)
        return TrainOutput(updates, 0.0, {"train_runtime": 0.0, "train_loss": 0.0})

    def _check_folder(self) -> None:
        """Raise ConfigError if output_dir has a run that is to be trained from the start."""
        if _has_run(self.args.output_dir) and not self._trainer.is_open:
            raise ConfigError(
                f"output_dir={self.args.output_dir!r} contains a run, which TRL would overwrite; continue it with "
                "train(resume_from_checkpoint=True), remove it, or give another output_dir"
            )

    def _check_unchanged(self) -> None:
        """Raise ConfigError if arguments or datasets were set after the constructor, which the run would not see."""
        for name, value in self._read.items():
            now, row = getattr(self.args, name), TRL.row_of(name)
            if now != value and (row is None or row.kind != "ignored"):
                raise ConfigError(
                    f"args.{name}={shown(now)} was set after GRPOTrainer had read {shown(value)}; set it before, or "
                    "give the args to another GRPOTrainer"
                )
        for name, data in self._read_data.items():
            if getattr(self, name) is not data:
                raise ConfigError(f"{name} was replaced after GRPOTrainer had read it; give it to another GRPOTrainer")

    def end(self) -> None:
        """Close the run, as `close` does."""
        self.close()

    def close(self) -> None:
        """Close the run, so that another may start; harmless if it is closed."""
        self._trainer.close()

    @property
    def model(self) -> Any:
        """Return the policy, with adapters as a peft model; before training, a model given as an object is that object
        unless it gets adapters.
        """
        if not self._opened and not isinstance(self._model, str) and not self._settings.get("model.lora.rank"):
            return self._model
        trainer = self._opened_trainer()
        with trl_names():
            return trainer.model

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings here that follow from the arguments."""
        return dict(self._settings)

    def _opened_trainer(self) -> Trainer:
        """Return the run underneath, which a caller is about to open."""
        if self._is_finished:
            raise RunError(
                f"output_dir={str(self.args.output_dir)!r} is finished, and its model is not loaded: load it from "
                f"{self._final_folder()}, or train further with a larger max_steps"
            )
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
        if self._text is not None:
            return self._text
        name = self._model if isinstance(self._model, str) else getattr(self._model, "name_or_path", "")
        if not name:
            return None
        if name.startswith("builtin://"):
            from hwgrpo.models.loading import load_tokenizer

            self._text = self.processing_class = load_tokenizer(ModelConfig(path=name))
            return self._text
        from hwgrpo.support.pretrained_tokenizer import pretrained_tokenizer

        code = self.args.trust_remote_code
        self._text = self.processing_class = pretrained_tokenizer(name, trust_remote_code=code)
        return self._text

    def _image_prompts(self) -> ImagePrompts | None:
        """Return what makes prompts with images; None where the model reads text alone.

        Raises:
            ConfigError: its image processor is missing, or is another one than the script's.
        """
        from hwgrpo.data.image_prompts import load_image_prompts
        from hwgrpo.models.loading import load_model_config, resolve_model_path

        named = isinstance(self._model, str)
        path = self._model if named else str(getattr(self._model, "name_or_path", ""))
        code = self.args.trust_remote_code
        config = load_model_config(ModelConfig(path=path, trust_remote_code=code)) if named else self._model.config
        if not reads_images(config):
            return None
        if named:
            path = resolve_model_path(path)
        if isinstance(self.processing_class, ProcessorMixin):
            check_image_processor(self.processing_class, path)
        return load_image_prompts(path, None, config, self._tokenizer())

    def _vision_settings(self, *, adapted: bool) -> dict[str, Any]:
        if self._images is None:
            return {}
        return vision_settings(None if isinstance(self._model, str) else self._model, adapted=adapted)

    def _model_type(self) -> str | None:
        if self._model.startswith("builtin://"):
            return None
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self._model, trust_remote_code=self.args.trust_remote_code).model_type

    def _completions_per_update(self) -> int:
        return self._batches.prompts_per_update * (self.args.num_generations or 1)


def _listed(rewards: Any) -> list[Any]:
    return list(rewards) if isinstance(rewards, list | tuple) else [rewards]


def _has_run(folder: Any) -> bool:
    """Return whether a folder contains a run."""
    return any((Path(str(folder)) / name).exists() for name in ("metrics.jsonl", "checkpoints"))


def _default_folder(model: Any) -> str:
    """Return output_dir without args: the last part of the model's name, as in TRL."""
    name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or type(model).__name__
    return f"{name.partition('?')[0].rstrip('/').rpartition('/')[2]}-GRPO"
