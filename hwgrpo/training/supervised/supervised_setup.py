"""Builds a supervised run from its settings: the parts of a GRPO run, without engine, rewards and reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwgrpo_backends import Backend
from hwgrpo_backends.device import Device

from hwgrpo.config import Config
from hwgrpo.config.derived import planned_steps
from hwgrpo.config.load import to_yaml
from hwgrpo.config.named_files import with_absolute_paths
from hwgrpo.config.supervised import supervised_settings
from hwgrpo.config.written_config import digests, written_of
from hwgrpo.data.examples import ExampleDataset, build_examples
from hwgrpo.data.prompts import PromptDataset
from hwgrpo.data.row_filter import are_logged
from hwgrpo.models.loading import load_generation_config, load_model_config, load_tokenizer
from hwgrpo.models.time_steps import time_step_note
from hwgrpo.observe.saved_config import saved_settings
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.rollout.stopping import end_token_ids
from hwgrpo.support.free_cores import FreeCoreThreads
from hwgrpo.training.checkpoint.restore import Checkpoint, set_aside_later
from hwgrpo.training.checkpoint.saver import Saver
from hwgrpo.training.model_setup import Models
from hwgrpo.training.out_of_memory import LOADING, explain_out_of_memory
from hwgrpo.training.policy.auto_settings import dtype_note
from hwgrpo.training.resume import compare_data, open_folder, restore, restore_generators, template_date
from hwgrpo.training.resume_check import RECORD, ResumeCheck
from hwgrpo.training.run_parts import TrainingRun
from hwgrpo.training.run_record import (
    frozen_dtype_note,
    machine_metrics,
    prompt_notes,
    start_summary,
    write_kernel_selections,
    write_run_record,
)
from hwgrpo.training.setup import build_models, make_observer, make_prompt_source, make_update, start_strategy
from hwgrpo.training.shared_setup import follow_free_cores, load_trainable, prepare_process
from hwgrpo.training.startup_checks import Prompts, check_start
from hwgrpo.training.strategies.lost_ranks import name_lost_ranks
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.supervised.steps import supervised_step, validate_examples
from hwgrpo.training.update.policy_update import PolicyUpdate


@dataclass(frozen=True)
class Training:
    """What differs between the commands that train on examples."""

    command: str
    """Name of the command, for checkpoints: each continues its own."""
    open_examples: Callable[[Config], Prompts]
    """Opens the training and validation examples, with the tokenizer."""
    example_notes: Callable[[Config, Prompts, int], list[str]]
    """Returns notes on the examples, by the number of steps."""
    step: Callable[[TrainingRun, int], None]
    """Trains on the examples of a step."""
    validate: Callable[[TrainingRun, int], None]
    """Logs what the validation examples say after a step."""
    build_models: Callable[[Config, Device, Strategy, Prompts], tuple[Models, list[str]]]
    """Checks the settings; makes the model, wrapped by the strategy, and notes on it."""
    update: type[PolicyUpdate] = PolicyUpdate
    """Makes the optimizer updates."""
    load_model: Callable[[Config], Any] = load_trainable
    """Loads the untrained model into host memory."""
    check: Callable[[Config], None] = lambda config: None
    """Raises ConfigError for settings that the command does not support."""
    trains_head: bool = False
    """The model is the policy's, with the language-model head, whose memory is estimated."""


def build_supervised(
    written: Config,
    backend: Backend,
    local_rank: int,
    local_world_size: int,
    *,
    training: Training | None = None,
    allow_finished: bool = False,
    notes: Sequence[str] = (),
) -> TrainingRun:
    """Make every part of a supervised run, and restore the checkpoint selected by `trainer.resume`.

    Args:
        training: the command's own parts; None: those of supervised fine-tuning.

    The other args and the errors are those of `hwgrpo.training.setup.build_run`.
    """
    config = with_absolute_paths(supervised_settings(written))
    (training or SFT).check(config)
    threads = follow_free_cores(config)
    device = prepare_process(config, backend, local_rank, local_world_size)
    with name_lost_ranks(), explain_out_of_memory(config, device, lambda: LOADING), ExitStack() as undo:
        run = _build(training or SFT, config, device, threads, undo, allow_finished, notes, written=written)
        undo.pop_all()
    return run


def open_examples(config: Config) -> Prompts:
    """Open the training and validation examples, with the tokenizer."""
    tokenizer = load_tokenizer(config.model)
    ends = end_token_ids(tokenizer, load_generation_config(config.model), ())
    longest = config.rollout.max_response_tokens
    training, validation = (
        build_examples(config.data, tokenizer, ends, longest, which) for which in ("train", "validation")
    )
    assert training is not None
    return Prompts(tokenizer, training, validation)


def example_notes(config: Config, data: Prompts, total_steps: int) -> list[str]:
    """Return notes on the examples: passes over them, long responses, and a validation that has none."""
    t, count = config.trainer, len(data.training)
    drawn = total_steps * t.prompts_per_step
    notes = [f"{total_steps} steps of {t.prompts_per_step} examples: {drawn / count:.2f} passes over {count:,}"]
    for name, examples in (("training", data.training), ("validation", data.validation)):
        if isinstance(examples, ExampleDataset) and examples.long_responses:
            what = "dropped" if config.data.overlong == "filter" else "cut"
            notes.append(
                f"{name} responses longer than rollout.max_response_tokens={config.rollout.max_response_tokens}: "
                f"{examples.long_responses} {what}"
            )
    if are_logged(data.training.rows):
        notes.append(_logged_note(config, data.training))
    if data.validation is None and config.data.validation:
        notes.append(f"no validation loss: {config.data.validation} has no column {config.data.response_key!r}")
    return notes


def _logged_note(config: Config, examples: PromptDataset) -> str:
    """Return how many of a run's logged responses are trained, and how many it did not log."""
    rows = examples.rows
    kept = f"{len(examples):,} of {len(rows):,} logged responses are trained (data.keep={config.data.keep or 'null'})"
    run = saved_settings(Path(rows.parts[0].name).parent)
    logged = (run.get("observe") or {}).get("completions_per_step")
    sampled = [(run.get("trainer") or {}).get("prompts_per_step"), (run.get("rollout") or {}).get("n")]
    counts = [number for number in sampled if isinstance(number, int)]
    if not isinstance(logged, int) or len(counts) < 2 or logged >= math.prod(counts):
        return kept
    return (
        f"{kept}; that run logged {logged} of {math.prod(counts)} responses per step, "
        f"observe.completions_per_step={math.prod(counts)} logs all"
    )


def _build_models(config: Config, device: Device, strategy: Strategy, data: Prompts) -> tuple[Models, list[str]]:
    resolved = check_start(config, device.backend, load_model_config(config.model), device=device, data=data)
    models = build_models(config, device, strategy, data.tokenizer, resolved.attention, resolved.layout, samples=False)
    notes = models.fused.attention.line, models.fused.line, resolved.layout_note, models.layout_reason
    return models, [*resolved.notes, *filter(None, (*notes, models.attention_note, time_step_note(models.policy)))]


SFT = Training("sft", open_examples, example_notes, supervised_step, validate_examples, _build_models, trains_head=True)


def _build(
    training: Training,
    config: Config,
    device: Device,
    threads: FreeCoreThreads | None,
    undo: ExitStack,
    allow_finished: bool,
    notes: Sequence[str],
    *,
    written: Config,
) -> TrainingRun:
    strategy = start_strategy(config, device)
    opened: Callable[[], Prompts] = functools.cache(lambda: training.open_examples(config))

    def opened_for(checkpoint: Checkpoint | None) -> PromptDataset:
        config.data.template_date = template_date(config, checkpoint)
        return opened().training

    folder = open_folder(
        written,
        Path(config.trainer.output_dir),
        strategy,
        undo,
        allow_finished,
        command=training.command,
        open_data=opened_for,
    )
    start, notes = folder.start, list(notes)
    config.data.template_date = strategy.gather_objects(template_date(config, folder.checkpoint))[0]
    data = opened()
    changes = [*folder.notes, *compare_data(folder.checkpoint, train=data.training, validation=data.validation)]
    notes += changes
    models, model_notes = training.build_models(config, device, strategy, data)
    notes += (*filter(None, (dtype_note(config.model.dtype, device),)), *model_notes)
    total_steps = max(start, planned_steps(config, len(data.training)))
    source = make_prompt_source(config, data.training, strategy)
    update = make_update(config, device, strategy, models, folder.path, total_steps, training.update)
    if folder.checkpoint is not None:
        notes += restore(folder.checkpoint, update, source, strategy)
    check = ResumeCheck(config, device, update, strategy) if training.trains_head else None
    if check is not None and folder.checkpoint is not None and start < total_steps:
        notes += filter(None, (check.compare(folder.checkpoint),))
    resumes = [] if check is None else check.resumes
    observer = make_observer(config, folder, strategy, total_steps)
    undo.callback(observer.close)
    if strategy.rank == 0:
        for later in set_aside_later(folder.path / "checkpoints", start):
            notes.append(f"later than step {start}, set aside: {later}")
        if start < total_steps or start == 0:
            date = config.data.template_date
            write_run_record(folder, written, device, total_steps, models, data, strategy, date, changes, resumes)
    observer.resume_from(start)
    notes += filter(None, (frozen_dtype_note(config.model, models),))
    notes += (*prompt_notes(config.data, data), *training.example_notes(config, data, total_steps))
    for note in (*notes, start_summary(config.model, device, models, data, start)):
        observer.note(note)

    secrets = strategy.gather_objects(digests(written_of(written)))[0]
    datasets = {"train": data.training, "validation": data.validation}
    fingerprints = {name: examples.fingerprint for name, examples in datasets.items() if examples is not None}
    settings = to_yaml(written)

    def state() -> dict[str, Any]:
        return {
            "command": training.command,
            "sampler": source.state(),
            **update.state(),
            "config": settings,
            "secrets": secrets,
            "data": fingerprints,
            "template_date": config.data.template_date,
            RECORD: resumes,
        }

    saver = Saver(
        folder.path / "checkpoints",
        strategy,
        device,
        keep=config.trainer.keep_checkpoints,
        asynchronous=config.trainer.save_async,
        state=state,
        extra_files=dict if check is None else check.files,
        note=observer.note,
        folder_moved=lambda: folder.lock.moved() if folder.lock is not None else None,
        timeout=config.trainer.process_group_timeout,
    )
    peak = device.peak(models.policy.compute_dtype)
    run = TrainingRun(
        config=config,
        device=device,
        strategy=strategy,
        prompts=source,
        update=update,
        validation=data.validation,
        observer=observer,
        watch=Stopwatch(device.synchronize, trace=device.trace),
        saver=saver,
        record_kernels=lambda: write_kernel_selections(folder.path, strategy.rank),
        machine=lambda: machine_metrics(device, threads),
        threads=threads,
        peak=peak.flops if peak else None,
        tokenizer=data.tokenizer,
        load_model=training.load_model,
        lock=folder.lock,
        start_step=start,
        total_steps=total_steps,
    )
    for note in restore_generators(folder.checkpoint, config, strategy, device):
        observer.note(note)
    return run
