"""Builds a run from its settings: cheap parts that may fail first, the model last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hwgrpo_backends import Backend
from hwgrpo_backends.device import Device

from hwgrpo.algorithms.settings_of_ratio import ratio_note
from hwgrpo.catalog import STRATEGIES
from hwgrpo.config import Config
from hwgrpo.config.derived import (
    has_exact_kl,
    largest_kl,
    longest_share,
    planned_steps,
    prompts_per_update,
    sampling_of,
)
from hwgrpo.config.load import to_yaml
from hwgrpo.config.named_files import with_absolute_paths
from hwgrpo.config.written_config import digests, written_of
from hwgrpo.data.difficulty import make_sampler
from hwgrpo.data.prompts import PromptDataset, repeats_note
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_model_config, load_tokenizer, resolve_model_path
from hwgrpo.models.rounding import unit_of_sum
from hwgrpo.models.time_steps import time_step_note
from hwgrpo.observe.custom_metrics import CustomMetrics
from hwgrpo.observe.observer import Observer
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.rollout.engine import Engine
from hwgrpo.rollout.pause_gate import Gate
from hwgrpo.rollout.policy_weights import ShardedWeights
from hwgrpo.rollout.shared_devices import sleeps
from hwgrpo.support.free_cores import FreeCoreThreads
from hwgrpo.training.checkpoint.restore import set_aside_later
from hwgrpo.training.checkpoint.saver import Saver
from hwgrpo.training.code_files import checksums, keep_copies
from hwgrpo.training.end_of_turn import end_of_turn_note
from hwgrpo.training.feed import group_files, prefetched_batches
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.feed.response_source import ResponseSource, SourceParts, make_source
from hwgrpo.training.feed.scored_groups import NO_GROUPS
from hwgrpo.training.feed.weight_probes import probe_weights
from hwgrpo.training.model_setup import Models, build_models
from hwgrpo.training.moving_reference import reference_note, restore_reference
from hwgrpo.training.online_rewards import further_files, restore_rewards
from hwgrpo.training.out_of_memory import LOADING, explain_out_of_memory
from hwgrpo.training.policy.auto_settings import choose_strategy, dtype_note, micro_batch_tokens
from hwgrpo.training.resume import LockedFolder, compare_data, open_folder, restore, restore_generators, template_date
from hwgrpo.training.resume_check import RECORD, ResumeCheck
from hwgrpo.training.rollout_guard import RolloutGuard
from hwgrpo.training.run_parts import Run
from hwgrpo.training.run_record import (
    filters_note,
    frozen_dtype_note,
    machine_metrics,
    partial_note,
    prompt_notes,
    start_summary,
    write_kernel_selections,
    write_run_record,
)
from hwgrpo.training.shared_setup import build_engine, follow_free_cores, load_trainable, prepare_process
from hwgrpo.training.stages.capture import StepCapture
from hwgrpo.training.stages.profile import StepProfile
from hwgrpo.training.startup_checks import Data, check_start, missing_requirements, open_data, require_running_server
from hwgrpo.training.step_stages import build_stages
from hwgrpo.training.strategies.ddp import Ddp
from hwgrpo.training.strategies.lost_ranks import name_lost_ranks
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.strategies.strategy_kind import StrategyKind
from hwgrpo.training.text_notes import text_notes
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.token_budget import TokenBudget


def build_run(
    config: Config,
    backend: Backend,
    local_rank: int,
    local_world_size: int,
    *,
    allow_finished: bool = False,
    notes: Sequence[str] = (),
    engine_share: float | None = None,
    observe: Callable[[Observer], Observer] = lambda observer: observer,
) -> Run:
    """Make every part of a run, and restore the checkpoint selected by `trainer.resume`.

    If a first start fails here, `trainer.output_dir` is left empty.

    Args:
        config: checked settings.
        backend: the selected device family.
        local_rank: index of this process's device on the host.
        local_world_size: processes of this run on this host.
        allow_finished: a finished run of other settings or data is not an error.
        notes: notes for the user on choices made before.
        engine_share: `rollout.gpu_memory_utilization` of this start, where it is null; not recorded.
        observe: returns the run's observer for the one of the settings.

    Raises:
        ConfigError, DataError, CheckpointError: with the wrong value and its remedy.
        RunError: the model does not fit into memory, or a rank is missing or lost.
        RunFinished: all steps are done, and all outputs exist.
    """
    threads = follow_free_cores(config)
    device = prepare_process(config, backend, local_rank, local_world_size)
    with name_lost_ranks(), explain_out_of_memory(config, device, lambda: LOADING), ExitStack() as undo:
        here = with_absolute_paths(config)
        if engine_share is not None:
            here.rollout.gpu_memory_utilization = engine_share
        run = _build(here, device, threads, undo, allow_finished, notes, observe, written=config)
        undo.pop_all()
    return run


def _build(
    config: Config,
    device: Device,
    threads: FreeCoreThreads | None,
    undo: ExitStack,
    allow_finished: bool,
    notes: Sequence[str],
    observe: Callable[[Observer], Observer],
    *,
    written: Config,
) -> Run:
    """Make every part of a run.

    Args:
        config: the settings, with absolute paths.
        device: this rank's device.
        threads: sets the threads of each step.
        undo: receives the callbacks that close the parts.
        allow_finished, notes, observe: as for `build_run`.
        written: the settings for the run's records, with the user's own paths.
    """
    strategy = start_strategy(config, device)
    folder = open_folder(written, Path(config.trainer.output_dir), strategy, undo, allow_finished)
    start, notes = folder.start, list(notes)
    metrics = CustomMetrics(config.observe)
    config.data.template_date = strategy.gather_objects(template_date(config, folder.checkpoint))[0]
    data = open_data(config, load_tokenizer(config.model), strategy.rank, device)
    undo.callback(data.rewards.close)
    changes = [*folder.notes, *compare_data(folder.checkpoint, train=data.training, validation=data.validation)]
    notes += changes
    settings = load_model_config(config.model)
    resumes = folder.checkpoint is not None
    resolved = check_start(config, device.backend, settings, device=device, data=data, resumes=resumes)
    notes += filter(None, (end_of_turn_note(config, settings, data.tokenizer, data.training, data.validation),))
    require_running_server(config, strategy)
    notes += (*resolved.notes, *filter(None, (dtype_note(config.model.dtype, device),)))
    planned = planned_steps(config, len(data.training))
    if start >= planned:
        notes.append(f"{folder.path} has all its {start} steps; its missing outputs (model, summary) are written now")
    total_steps = max(start, planned)

    models = build_models(config, device, strategy, data.tokenizer, resolved.attention, resolved.layout)
    lines = (models.fused.attention.line, models.fused.line, resolved.layout_note, models.layout_reason)
    notes += filter(None, (*lines, models.attention_note, time_step_note(models.policy)))
    source = make_prompt_source(config, data.training, strategy)
    update = make_update(config, device, strategy, models, folder.path, total_steps)
    if folder.checkpoint is not None:
        notes += restore(folder.checkpoint, update, source, strategy)
        notes += restore_rewards(data.rewards, folder.checkpoint, strategy)
        notes += restore_reference(models.reference, folder.checkpoint, strategy, config.algorithm.kl)
    resume_check = ResumeCheck(config, device, update, strategy)
    if folder.checkpoint is not None and start < total_steps:
        notes += filter(None, (resume_check.compare(folder.checkpoint),))
    gate = Gate(config.rollout.partial, config.trainer.process_group_timeout)
    engine = _engine(config, device, strategy, models, data, folder, gate)
    position, kept, prefetched = source.state(), NO_GROUPS, []
    if folder.checkpoint is not None and config.algorithm.filter_groups.enable:
        kept, load_notes = group_files.load(folder.checkpoint, data.training, data.rewards.names, config, strategy)
        notes += load_notes
    if folder.checkpoint is not None and config.rollout.max_staleness:
        prefetched, load_notes = prefetched_batches.load(
            folder.checkpoint, source, config, data.rewards.names, strategy
        )
        notes += load_notes
    responses = make_source(
        SourceParts(
            config=config,
            prompts=source,
            engine=engine,
            gate=gate,
            device=device,
            strategy=strategy,
            rewards=data.rewards,
            start=start,
            total_steps=total_steps,
            dropout=update.has_dropout,
            prefetched=prefetched,
            state=position,
            kept=kept,
            checkpoint=folder.checkpoint,
        )
    )
    undo.callback(responses.close)
    guard = RolloutGuard(config, update, responses, data.tokenizer, folder.checkpoint)
    probes = probe_weights(config, responses, engine, update, data.tokenizer, start)

    observer = observe(make_observer(config, folder, strategy, total_steps))
    undo.callback(observer.close)
    if strategy.rank == 0:
        for later in set_aside_later(folder.path / "checkpoints", start):
            notes.append(f"later than step {start}, set aside: {later}")
        if start < total_steps or start == 0:
            keep_copies(config, folder.path)
            date = config.data.template_date
            resumes = resume_check.resumes
            write_run_record(folder, written, device, total_steps, models, data, strategy, date, changes, resumes)
    observer.resume_from(start)
    notes += filter(
        None, (frozen_dtype_note(config.model, models), filters_note(config, models), reference_note(config))
    )
    notes += filter(None, (partial_note(config.rollout),))
    if not update.needs_old_logprobs and config.algorithm.old_logprobs == "trainer":
        notes += filter(None, (ratio_note(config.algorithm.loss),))
    notes += (
        *engine.notes,
        *prompt_notes(config.data, data),
        *text_notes(config, data.tokenizer, data.training.texts, data.training.marks),
    )
    notes += _late_steps(config, total_steps)
    notes += filter(None, (repeats_note(data.training, config.trainer.prompts_per_step),))
    notes.append(start_summary(config.model, device, models, data, start))
    for note in notes:
        observer.note(note)

    peak = device.peak(models.policy.compute_dtype)
    run = Run(
        config=config,
        device=device,
        strategy=strategy,
        prompts=source,
        responses=responses,
        engine=engine,
        engine_sleeps=sleeps(config.rollout, on_host=device.backend.is_host),
        sampling=sampling_of(config),
        rewards=data.rewards,
        update=update,
        guard=guard,
        probes=probes,
        reference=models.reference,
        validation=data.validation,
        observer=observer,
        metrics=metrics,
        capture=_capture(config, written, device, strategy, update, models, total_steps),
        profile=_profile(config, device, strategy),
        watch=Stopwatch(device.synchronize, trace=device.trace),
        saver=_saver(
            config, written, device, strategy, folder, data, update, guard, responses, models, observer, resume_check
        ),
        record_kernels=lambda: write_kernel_selections(folder.path, strategy.rank),
        machine=lambda: machine_metrics(device, threads),
        threads=threads,
        peak=peak.flops if peak else None,
        tokenizer=data.tokenizer,
        load_model=load_trainable,
        lock=folder.lock,
        start_step=start,
        total_steps=total_steps,
    )
    run.stages = build_stages(run)
    for note in restore_generators(folder.checkpoint, config, strategy, device):
        observer.note(note)
    return run


def _late_steps(config: Config, total_steps: int) -> list[str]:
    """Return notes on steps to capture or profile that the run does not have."""
    trainer = config.trainer
    named = {"capture_steps": trainer.capture_steps, "profile_steps": trainer.profile_steps}
    late = {name: [step for step in steps if step > total_steps] for name, steps in named.items()}
    return [
        f"trainer.{name} has {steps}, after the run's last step {total_steps}" for name, steps in late.items() if steps
    ]


def _capture(
    config: Config,
    written: Config,
    device: Device,
    strategy: Strategy,
    update: PolicyUpdate,
    models: Models,
    total_steps: int,
) -> StepCapture | None:
    """Return what captures steps, where the settings ask for it."""
    if not config.trainer.capture_steps:
        return None
    assert isinstance(strategy, Single | Ddp), "missing_requirements refuses others"
    dtype = update.policy.compute_dtype
    machine = {
        "backend": device.backend.name,
        "device": device.name,
        "arch": device.arch,
        "dtype": str(dtype).removeprefix("torch."),
        "rounding": unit_of_sum(dtype, update.policy.hidden_size),  # of TF32, where torch uses it
        "layout": update.layout.name,
        "attention": models.fused.attention.name,
    }
    return StepCapture(config, written, device, strategy, update, models.reference, total_steps, machine)


def _profile(config: Config, device: Device, strategy: Strategy) -> StepProfile | None:
    """Return what profiles steps, where the settings ask for it."""
    steps = config.trainer.profile_steps
    return StepProfile(steps, Path(config.trainer.output_dir), device, strategy.rank) if steps else None


def start_strategy(config: Config, device: Device) -> Strategy:
    """Check the requirements on this machine, and join the run's processes."""
    # Writes a built-in or GGUF model to disk: once a process group exists, transformers writes only on rank 0.
    resolve_model_path(config.model.path, weights=True)
    for reason in missing_requirements(config, device):
        raise ConfigError(reason)
    kind: StrategyKind = STRATEGIES.load(choose_strategy(config.trainer.strategy))
    strategy = kind.make(device.torch_device, device.comm_backend, config.trainer.process_group_timeout)
    strategy.prepare(config)
    return strategy


def make_prompt_source(config: Config, training: PromptDataset, strategy: Strategy) -> PromptSource:
    t = config.trainer
    sampler = make_sampler(len(training), t.seed, config.data)
    per_update = prompts_per_update(config)
    return PromptSource(training, sampler, t.prompts_per_step, per_update, strategy.rank, strategy.world_size)


def make_update(
    config: Config, device: Device, strategy: Strategy, models: Models, output: Path, total_steps: int, kind: Any = None
) -> PolicyUpdate:
    updates_per_step = config.trainer.prompts_per_step // prompts_per_update(config) * config.trainer.epochs_per_batch
    tokens = micro_batch_tokens(config, device.torch_device)
    return (kind or PolicyUpdate)(
        config=config,
        strategy=strategy,
        policy=models.policy,
        device=device.torch_device,
        layout=models.layout,
        reference=models.reference if has_exact_kl(config) else None,
        budget=TokenBudget(tokens, least=longest_share(config), device=device, folder=output),
        total_updates=total_steps * updates_per_step,
    )


def _engine(
    config: Config, device: Device, strategy: Strategy, models: Models, data: Data, folder: LockedFolder, gate: Gate
) -> Engine:
    """Make the rollout engine, and send it the weights of the first step."""
    weights = ShardedWeights(models.policy.model, strategy.gather_full_parameters) if strategy.shards else None
    run_id = folder.lock.run_id if folder.lock is not None else None
    engine = build_engine(config, models.policy, data.tokenizer, device, models.replica, gate, weights, run_id)
    engine.update_weights(folder.start)
    return engine


def make_observer(config: Config, folder: LockedFolder, strategy: Strategy, total_steps: int) -> Observer:
    return Observer(
        config.observe,
        folder.path,
        total_steps=total_steps,
        is_main=strategy.rank == 0,
        largest_kl=largest_kl(config.algorithm.kl),
    )


def _saver(
    config: Config,
    written: Config,
    device: Device,
    strategy: Strategy,
    folder: LockedFolder,
    data: Data,
    update: PolicyUpdate,
    guard: RolloutGuard,
    responses: ResponseSource,
    models: Models,
    observer: Observer,
    resume_check: ResumeCheck,
) -> Saver:
    """Return the saver of checkpoints, with all state that a resumed run restores or compares."""
    # Salts are random, and files may differ between hosts: all ranks save rank 0's values.
    secrets, code = strategy.gather_objects((digests(written_of(config)), checksums(config)))[0]
    datasets = {"train": data.training, "validation": data.validation}
    fingerprints = {name: prompts.fingerprint for name, prompts in datasets.items() if prompts is not None}

    settings = to_yaml(written)

    def state() -> dict[str, Any]:
        return {
            "sampler": responses.state(),
            **update.state(),
            "guard": guard.state(),
            "rewards": data.rewards.metrics.state(),
            "config": settings,
            "secrets": secrets,
            "data": fingerprints,
            "template_date": config.data.template_date,
            "code": code,
            RECORD: resume_check.resumes,
        }

    return Saver(
        folder.path / "checkpoints",
        strategy,
        device,
        keep=config.trainer.keep_checkpoints,
        asynchronous=config.trainer.save_async,
        state=state,
        extra_files=lambda: (
            responses.files()
            | further_files(config.algorithm, data.rewards, models.reference, strategy)
            | resume_check.files()
        ),
        note=observer.note,
        folder_moved=lambda: folder.lock.moved() if folder.lock is not None else None,
        timeout=config.trainer.process_group_timeout,
    )
