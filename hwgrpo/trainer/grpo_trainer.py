"""`Trainer`: the run of `hwgrpo train` as an object, for notebooks and scripts."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from hwgrpo_backends.environment import apply

from hwgrpo.cli.backend_selection import prepare_host
from hwgrpo.config import Config
from hwgrpo.errors import ConfigError, RunError, RunFinished
from hwgrpo.support.given_objects import given
from hwgrpo.trainer.given_settings import EVALUATION, MODEL, TOKENIZER, check_prompts, load_given
from hwgrpo.trainer.process_state import RestoredEnvironment, restored_process
from hwgrpo.trainer.step_record import Step, StepRecorder

if TYPE_CHECKING:
    import torch
    from hwgrpo_backends.device import Device

    from hwgrpo.data.prompts import PromptDataset
    from hwgrpo.training.run_parts import Run

_open: list[weakref.ref[Trainer]] = []
"""The trainer of the open run of this process, if there is one."""


class Trainer:
    """A GRPO run: iterate over it to train step by step, or call `train`.

    The constructor checks settings, prompts and reward functions; the model loads at the first use. While the run is
    open, the process has its settings (threads, determinism, seeds, environment variables); `close` restores them, and
    a run closes by itself when it ends, also by an error or a `break`. A process has one open run at a time: a
    start closes another one, unless it is being iterated, which is an error.

    Under torchrun every rank makes the same Trainer and calls the same methods; rank 0 writes.

    Args:
        config: settings from `Config.load`, a recipe (name or path), or a mapping with nested or dotted keys.
        overrides: `section.key=value` arguments, as of `hwgrpo train`.
        model: a transformers model to train, in place of `model.path`; it is written to `output_dir/objects` once, and
            without LoRA it gets the trained weights at the end.
        tokenizer: its tokenizer; None: the one of the model's `name_or_path`.
        train_data: rows in place of `data.train`: a `datasets.Dataset`, a list of dicts, or a sequence of mappings.
        validation_data: the same in place of `data.validation`.
        rewards: reward functions in place of `reward.functions`: a function or name, a sequence of functions, names and
            entries as in `reward.functions`, or a mapping from names to functions. They run in this process.
        reward_weights: a weight for each reward function.
        tools: functions that the policy may call, in place of `rollout.agent.tools`: functions, names and entries as
            there. A function runs in threads of this process: a call that is late is abandoned, not killed. The
            default of `rollout.workflow` is then `tools`, with environments `environment`.
        environments: classes, or functions that make instances, in place of `rollout.agent.environments`; a mapping
            gives them names.

    Raises:
        ConfigError, DataError: with the wrong value and its remedy.
    """

    def __init__(
        self,
        config: Config | str | Path | Mapping[str, Any],
        overrides: Sequence[str] = (),
        *,
        model: Any = None,
        tokenizer: Any = None,
        train_data: Any = None,
        validation_data: Any = None,
        rewards: Any = None,
        reward_weights: Sequence[float] | None = None,
        tools: Any = None,
        environments: Any = None,
    ) -> None:
        with RestoredEnvironment():
            self._config, self._objects = load_given(
                config,
                overrides,
                train_data=train_data,
                validation_data=validation_data,
                rewards=rewards,
                reward_weights=reward_weights,
                model=model,
                tokenizer=tokenizer,
                tools=tools,
                environments=environments,
            )
            self._host = prepare_host(self._config)
            if model is not None:
                from hwgrpo.trainer.given_model import check_model

                settings = self._config.model
                check_model(model, trains_all=not settings.lora.rank, train_vision=settings.train_vision)
        self._run: Run | None = None
        self._recorder: StepRecorder | None = None
        self._environment = RestoredEnvironment()
        self._close: weakref.finalize[Any, Any] | None = None
        self._steps: weakref.ref[Iterator[Step]] | None = None
        self._status: Literal["completed", "interrupted"] | None = None
        self._step = 0
        self._stopping = False

    @property
    def config(self) -> Config:
        """The run's settings; what depends on the devices is resolved when the run opens."""
        return self._config

    @property
    def step(self) -> int:
        """The last finished step; 0 before the first, and before a resumed run opens."""
        return self._step

    @property
    def total_steps(self) -> int:
        """Steps of the run, those of earlier starts included."""
        return self._opened().total_steps

    @property
    def model(self) -> Any:
        """The policy: a transformers model, or with LoRA a peft model; under sharding this rank's shards."""
        return self._opened().update.policy.model

    @property
    def device(self) -> torch.device:
        """This process's device."""
        from hwgrpo_backends.device import Device

        return Device(self._host.backend, self._host.local_rank).torch_device

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._opened().tokenizer

    @property
    def validations(self) -> dict[int, dict[str, float]]:
        """Step -> metrics of the validation after it, of this start; 0: before training."""
        return {} if self._recorder is None else self._recorder.validations

    def __iter__(self) -> Iterator[Step]:
        """Train; yield each finished step. A `break` closes the run without a checkpoint of the step."""
        steps = None if self._steps is None else self._steps()
        if steps is None:
            steps = self._train()
            self._steps = weakref.ref(steps)
        return steps

    def train(self) -> Literal["completed", "interrupted"]:
        """Train the remaining steps, write the final model and the summary, and close the run.

        Returns:
            "interrupted" when `stop` or a signal ended the run early; its last step is then in a checkpoint.

        Raises:
            RunError, DataError, RewardError, CheckpointError: as `hwgrpo train` reports them.
        """
        for _ in self:
            pass
        assert self._status is not None
        return self._status

    def stop(self) -> None:
        """End the run after the current step, with a checkpoint."""
        self._stopping = True

    def save_checkpoint(self) -> Path:
        """Write a checkpoint of the last finished step now; return its folder. Call it between steps.

        Raises:
            RunError: no step is finished, the run is closed, the checkpoint cannot be written, or a rank is lost.
        """
        run = self._opened(training=True)
        from hwgrpo.training.checkpoint.checkpoint_files import folder_of
        from hwgrpo.training.strategies.lost_ranks import name_lost_ranks

        if not self._step:
            raise RunError("there is no checkpoint before the first step; call save_checkpoint after it")
        folder = folder_of(Path(run.config.trainer.output_dir) / "checkpoints", self._step)
        with name_lost_ranks():
            if run.saver.last_step == self._step:
                run.saver.wait()
            elif not run.strategy.gather_objects(folder.is_dir())[0]:
                run.saver.save(self._step, last=True)
        return folder

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Return the validation metrics of the present model; they are not logged.

        Call it before training, between steps, or after the end. It draws no random numbers of the training.

        Args:
            data: rows as for `train_data`; None: the run's validation prompts.

        Raises:
            ConfigError, DataError: there are no validation prompts, or a reward cannot score these.
            RunError: the run of several ranks has ended, or a rank is lost.
        """
        run = self._opened()
        from hwgrpo.training.evaluate import validate
        from hwgrpo.training.reward_setup import build_rewards, require_ground_truths, reward_metrics
        from hwgrpo.training.shared_setup import build_engine, prepare_process
        from hwgrpo.training.strategies.lost_ranks import name_lost_ranks

        if not self.is_open and run.strategy.world_size > 1:
            raise RunError("the processes of this run have separated at its end; evaluate before")
        with given(self._objects | {EVALUATION: data}), ExitStack() as parts:
            dataset = run.validation if data is None else self._dataset(run, data)
            if dataset is None:
                raise ConfigError("there are no validation prompts; give evaluate(data), or set data.validation")
            if self.is_open:
                engine, rewards = run.engine, run.rewards
                rewards.check_columns(dataset.columns)
                require_ground_truths(run.config.reward, dataset)
                rewards.check_prompts(dataset.prompt(row, 0) for row in range(len(dataset)))
                parts.enter_context(run.responses.exclusive_engine())
                self._environment.resume()
                parts.callback(self._environment.pause)
            else:
                parts.enter_context(self._process(run.device))
                prepare_process(run.config, self._host.backend, self._host.local_rank, self._host.local_world_size)
                rewards = build_rewards(run.config, dataset, tokenizer=run.tokenizer, device=run.device)
                parts.callback(rewards.close)
                engine = build_engine(run.config, run.update.policy, run.tokenizer, run.device)
                parts.callback(engine.close)
            with name_lost_ranks():
                values = validate(engine, dataset, rewards, run.config, run.strategy, self._step)
                return values | reward_metrics(rewards, run.strategy)

    def save_model(self, folder: str | Path, *, merge: bool = True) -> Path:
        """Write the present model and tokenizer in Hugging Face format; return the folder.

        Args:
            folder: where they go.
            merge: with LoRA, write the full model with the adapter merged in, instead of the adapter alone.

        Raises:
            RunError: the shards of an ended run cannot be gathered any more, or a rank is lost.
        """
        run = self._opened()
        from hwgrpo.models.saving import save_model, source_folder
        from hwgrpo.training.finish import full_model
        from hwgrpo.training.strategies.lost_ranks import name_lost_ranks

        if not self.is_open and run.strategy.shards:
            raise RunError(
                f"the shards of an ended run cannot be gathered; its model is in {run.config.trainer.output_dir}/final"
            )
        folder = Path(folder).expanduser()
        with name_lost_ranks():
            model = full_model(run)
            if run.strategy.rank == 0:
                source, dtype = source_folder(run.config.model), run.config.trainer.final_dtype
                save_model(model, run.tokenizer, folder, merge=merge, source=source, dtype=dtype)
            if self.is_open:
                run.strategy.barrier()
        return folder

    @property
    def is_open(self) -> bool:
        """Whether the run holds its folder and the process's settings."""
        return self._close is not None and self._close.alive

    def close(self) -> None:
        """End the run without a further checkpoint, and restore the process; harmless if it is closed."""
        if self._close is not None:
            self._close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _train(self) -> Iterator[Step]:
        if self._status is not None:
            return
        try:
            try:
                run = self._opened(training=True)
            except RunFinished as finished:
                from hwgrpo.cli.run_start import print_finished

                if self._host.rank == 0:
                    print_finished(finished)
                self._status = "completed"
                return
            assert self._recorder is not None
            self._environment.resume()
            from hwgrpo.training.checkpoint.checkpoint_files import folder_of
            from hwgrpo.training.finish import finish
            from hwgrpo.training.loop import iterate_steps, train_step, validate_now
            from hwgrpo.training.strategies.lost_ranks import name_lost_ranks

            checkpoints = Path(run.config.trainer.output_dir) / "checkpoints"
            with closing(cast(Any, iterate_steps(run, train_step, validate_now))) as steps:
                for step in steps:
                    self._step = step
                    saved = folder_of(checkpoints, step) if run.saver.last_step == step else None
                    self._environment.pause()
                    yield self._recorder.last(saved)
                    self._environment.resume()
                    with name_lost_ranks():
                        stopping = step < run.total_steps and run.strategy.sum([self._stopping])[0]
                    if stopping:
                        self.save_checkpoint()
                        run.observer.note(f"stopped by Trainer.stop after step {step}; it is saved")
                        run.interrupted = True
                        break
            self._status = "interrupted" if run.interrupted else "completed"
            finish(run, self._status)
            with name_lost_ranks():
                self._give_back_weights(run)
            self.close()
            # only after success: a failed rank would wait here for ranks that wait for it
            run.strategy.close()
        finally:
            self.close()

    def _opened(self, *, training: bool = False) -> Run:
        """Return the run; open it at the first call.

        Args:
            training: whether it must be open, and may be finished (RunFinished).
        """
        if self._run is None:
            try:
                self._run = self._open_run()
            except RunFinished as finished:
                if training:
                    raise
                raise RunError(str(finished)) from finished
        elif training and not self.is_open:
            raise RunError(
                f"this Trainer was closed after step {self._step}; make a new one, which resumes from the last "
                f"checkpoint in {self._run.config.trainer.output_dir}"
            )
        return self._run

    def _open_run(self) -> Run:
        other = _open[0]() if _open else None
        if other is not None and other._steps is not None and other._steps() is not None:
            folder = other.config.trainer.output_dir
            raise RunError(f"the Trainer of {folder} is open in this process; call its close() first")
        if other is not None:
            other.close()
        stack = ExitStack()
        with stack, given(self._objects):
            self._environment = stack.enter_context(RestoredEnvironment())
            apply(self._host.backend, "train", deterministic=self._config.trainer.deterministic)
            from hwgrpo_backends.device import Device

            from hwgrpo.cli.run_start import start_run

            _open.append(weakref.ref(self))
            stack.callback(_open.clear)
            stack.enter_context(restored_process(Device(self._host.backend, self._host.local_rank)))
            with self._written_objects() as notes:
                run = start_run(self._config, self._host, notes=notes, observe=cast(Any, StepRecorder))
            stack.callback(run.close)
            self._recorder = cast(StepRecorder, run.observer)
            self._step = run.start_step
            self._environment.pause()
            self._close = weakref.finalize(self, stack.pop_all().close)
        return run

    @contextmanager
    def _written_objects(self) -> Iterator[list[str]]:
        """Write the given model and tokenizer for a start; remove what was written if it fails."""
        model, tokenizer = self._objects.get(MODEL), self._objects.get(TOKENIZER)
        if model is None and tokenizer is None:
            yield []
            return
        from hwgrpo.trainer import given_model

        settings, trainer = self._config.model, self._config.trainer
        where = Path(trainer.output_dir), self._host.rank, trainer.process_group_timeout
        above = where[0] / given_model.FOLDER, where[0], *where[0].parents
        made = [folder for folder in above if not folder.exists()]
        given_paths = settings.path, settings.tokenizer
        written: list[Path] = []
        notes: list[str] = []
        try:
            if model is not None:
                folder, note = given_model.write_model(model, *where)
                settings.path = str(folder)
                if note is not None:
                    written.append(folder)
                    notes.append(note)
            if tokenizer is not None:
                folder, is_new = given_model.write_tokenizer(tokenizer, *where)
                settings.tokenizer = str(folder)
                if is_new:
                    written.append(folder)
            yield notes
        except BaseException:
            settings.path, settings.tokenizer = given_paths
            given_model.remove_unused(written, made)
            raise

    def _dataset(self, run: Run, data: Any) -> PromptDataset:
        """Return rows as validation prompts; call it in `given` with them as EVALUATION."""
        from hwgrpo.agents.agent_rows import rows_of_agents
        from hwgrpo.data.prompts import build_dataset
        from hwgrpo.models.loading import load_image_prompts

        check_prompts(data, EVALUATION, "data", run.config)
        settings = copy.copy(run.config.data)
        settings.validation, settings.validation_max_rows = EVALUATION, 0
        images = load_image_prompts(run.config.model, run.tokenizer)
        dataset = build_dataset(settings, run.tokenizer, "validation", rows_of_agents(run.config), images)
        assert dataset is not None
        return dataset

    @contextmanager
    def _process(self, device: Device) -> Iterator[None]:
        with RestoredEnvironment(), restored_process(device):
            yield

    def _give_back_weights(self, run: Run) -> None:
        """Copy the trained weights to the given model; with LoRA it stays as it is."""
        from hwgrpo.models.lora import uses_lora
        from hwgrpo.trainer.given_model import copy_weights
        from hwgrpo.training.finish import full_model

        model = self._objects.get(MODEL)
        if model is None or uses_lora(run.config.model.lora):
            return
        trained = full_model(run)
        if trained is not None:
            copy_weights(trained, model)
