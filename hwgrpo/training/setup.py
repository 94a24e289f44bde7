"""Putting a run together from its settings: the cheap and fallible parts first, the model last."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwgrpo_backends import Backend
from hwgrpo_backends.device import Device

from hwgrpo.catalog import STRATEGIES
from hwgrpo.config import Config
from hwgrpo.config.derived import largest_kl, longest_share, planned_steps, prompts_per_update, sampling_of
from hwgrpo.config.load import to_yaml
from hwgrpo.config.written_config import digests, written_of
from hwgrpo.data.prompts import PromptDataset
from hwgrpo.data.sampler import PromptSampler
from hwgrpo.errors import ConfigError, RunFinished
from hwgrpo.models.loading import load_model_config, load_tokenizer, resolve_model_path
from hwgrpo.observe.custom_metrics import CustomMetrics
from hwgrpo.observe.observer import Observer
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.paths import with_absolute_paths
from hwgrpo.rollout.engine import Engine
from hwgrpo.rollout.pause_gate import Gate
from hwgrpo.rollout.policy_weights import ShardedWeights
from hwgrpo.training.checkpoint.restore import Checkpoint, begin_after
from hwgrpo.training.checkpoint.saver import Saver
from hwgrpo.training.code_files import checksums, keep_copies
from hwgrpo.training.feed import prefetched_batches
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.feed.response_source import ResponseSource, SourceParts, make_source
from hwgrpo.training.model_setup import Models, put_together
from hwgrpo.training.out_of_memory import LOADING, explained
from hwgrpo.training.policy.auto_settings import choose_strategy, dtype_note, micro_batch_tokens
from hwgrpo.training.resume import already_finished, compare_data, find_checkpoint, restore, seed_rank
from hwgrpo.training.run_folder import Claim, claim_on_rank_0
from hwgrpo.training.run_parts import Run
from hwgrpo.training.run_record import (
    memory_metrics,
    prompt_notes,
    start_summary,
    write_kernel_choices,
    write_run_record,
)
from hwgrpo.training.shared_setup import build_engine, prepare_process
from hwgrpo.training.startup_checks import Data, check_start, lacking, open_data, require_running_server
from hwgrpo.training.strategies.strategy import Strategy, together
from hwgrpo.training.strategies.strategy_kind import StrategyKind
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.token_budget import TokenBudget


def build_run(
    config: Config, backend: Backend, local_rank: int, local_world_size: int, *, allow_finished: bool = False
) -> Run:
    """Make every part of a run, restoring the newest checkpoint where `trainer.resume` asks for it.

    A first start that fails here leaves nothing in `trainer.output_dir`.

    Args:
        config: checked settings.
        backend: the chosen device family.
        local_rank: which of this host's devices is ours.
        local_world_size: processes of this run on this host.
        allow_finished: a finished run of other settings or data counts as finished, instead of being an error.

    Raises:
        ConfigError, DataError, CheckpointError: naming what is wrong and what to do.
        RunError: the model does not fit into memory.
        RunFinished: all steps are done, and all that a run leaves is there.
    """
    device = prepare_process(config, backend, local_rank, local_world_size)
    with explained(config, device, lambda: LOADING), ExitStack() as undo:
        run = _build(with_absolute_paths(config), device, undo, allow_finished, written=config)
        undo.pop_all()
    return run


def _build(config: Config, device: Device, undo: ExitStack, allow_finished: bool, *, written: Config) -> Run:
    """Put a run together.

    Args:
        config: the settings, with absolute paths.
        device: where it trains.
        undo: receives what ends the parts that are made.
        allow_finished: as for `build_run`.
        written: the settings as they are recorded, with paths as the user wrote them.
    """
    strategy = _start_strategy(config, device)
    folder = _claim_folder(written, Path(config.trainer.output_dir), strategy, undo, allow_finished)
    start, notes = folder.start, folder.notes
    metrics = CustomMetrics(config.observe)
    data = open_data(config, load_tokenizer(config.model), strategy.rank)
    undo.callback(data.rewards.close)
    notes += compare_data(folder.checkpoint, train=data.training, validation=data.validation)
    chosen = check_start(config, device.backend, load_model_config(config.model), device=device, data=data)
    require_running_server(config, strategy)
    notes += filter(None, (dtype_note(config, device),))
    planned = planned_steps(config, len(data.training))
    if start >= planned:
        notes.append(
            f"{folder.path} has all its {start} steps; what is missing at its end (model, summary) is made now"
        )
    total_steps = max(start, planned)

    models = put_together(config, device, strategy, data.tokenizer, chosen.attention, chosen.layout)
    notes += filter(None, (models.fused.attention.line, models.fused.line, chosen.layout_note, models.obstacle))
    source = _prompt_source(config, data.training, strategy)
    update = _policy_update(config, device, strategy, models, folder.path, total_steps)
    if folder.checkpoint is not None:
        notes += restore(folder.checkpoint, update, source, strategy, device)
    else:
        seed_rank(device, config, strategy.rank)
    gate = Gate(config.rollout.partial, config.trainer.process_group_timeout)
    engine = _engine(config, device, strategy, models, data, folder, gate)
    drawn, ahead = source.state(), []
    if folder.checkpoint is not None and config.rollout.max_staleness:
        ahead, told = prefetched_batches.load(folder.checkpoint, source, config.rollout.max_staleness)
        notes += told
    responses = make_source(
        SourceParts(
            config=config,
            prompts=source,
            engine=engine,
            gate=gate,
            device=device,
            start=start,
            total_steps=total_steps,
            prefetched=ahead,
            state=drawn,
        )
    )
    undo.callback(responses.close)

    observer = _observer(config, folder, strategy, total_steps)
    undo.callback(observer.close)
    if strategy.rank == 0:
        for later in begin_after(folder.path / "checkpoints", start):
            notes.append(f"later than step {start}, set aside: {later}")
        if start < total_steps or start == 0:
            keep_copies(config, folder.path)
            write_run_record(folder.path, written, device, total_steps, models.fused, strategy)
    observer.resume_from(start)
    notes += (*engine.notes, *prompt_notes(config.data, data), start_summary(device, models, data, start))
    for note in notes:
        observer.note(note)

    peak = device.peak(models.policy.compute_dtype)
    return Run(
        config=config,
        device=device,
        strategy=strategy,
        prompts=source,
        responses=responses,
        engine=engine,
        sampling=sampling_of(config),
        rewards=data.rewards,
        update=update,
        reference=models.reference,
        validation=data.validation,
        observer=observer,
        metrics=metrics,
        watch=Stopwatch(device.synchronize, trace=device.trace),
        saver=_saver(config, written, device, strategy, folder, data, update, responses, observer),
        record_kernels=lambda: write_kernel_choices(folder.path, strategy.rank),
        memory=lambda: memory_metrics(device),
        peak=peak.flops if peak else None,
        tokenizer=data.tokenizer,
        lock=folder.lock,
        start_step=start,
        total_steps=total_steps,
    )


def _start_strategy(config: Config, device: Device) -> Strategy:
    """Check what this machine lacks for the run, and join the processes that train together."""
    # Makes a built-in model: once a process group exists, transformers writes on rank 0 alone.
    resolve_model_path(config.model.path)
    for reason in lacking(config, device):
        raise ConfigError(reason)
    kind: StrategyKind = STRATEGIES.load(choose_strategy(config))
    strategy = kind.make(device.torch_device, device.comm_backend, config.trainer.process_group_timeout)
    strategy.prepare(config)
    return strategy


@dataclass(frozen=True)
class _Folder:
    """A run's folder, held by this run."""

    path: Path
    lock: Claim | None
    """None on ranks other than the main one."""
    checkpoint: Checkpoint | None
    """What the run goes on from."""
    notes: list[str]

    @property
    def start(self) -> int:
        """Steps done already."""
        return self.checkpoint.step if self.checkpoint else 0


def _claim_folder(written: Config, path: Path, strategy: Strategy, undo: ExitStack, allow_finished: bool) -> _Folder:
    """Claim the run's folder, then choose the checkpoint to go on from.

    In this order: a run that still holds the folder saves checkpoints meanwhile.

    Raises:
        RunFinished: nothing is left to do.
    """
    lock = claim_on_rank_0(path, strategy)
    if lock is not None:
        undo.callback(lock.close)
    _raise_if_finished(written, strategy, allow_finished)
    checkpoint, notes = find_checkpoint(written, path, strategy)
    if lock is not None and checkpoint is not None:
        lock.keep()
    return _Folder(path, lock, checkpoint, list(notes))


def _prompt_source(config: Config, training: PromptDataset, strategy: Strategy) -> PromptSource:
    t = config.trainer
    sampler = PromptSampler(len(training), t.seed, config.data.shuffle)
    per_update = prompts_per_update(config)
    return PromptSource(training, sampler, t.prompts_per_step, per_update, strategy.rank, strategy.world_size)


def _policy_update(
    config: Config, device: Device, strategy: Strategy, models: Models, output: Path, total_steps: int
) -> PolicyUpdate:
    updates_per_step = config.trainer.prompts_per_step // prompts_per_update(config) * config.trainer.epochs_per_batch
    return PolicyUpdate(
        config=config,
        strategy=strategy,
        policy=models.policy,
        device=device.torch_device,
        layout=models.layout,
        budget=token_budget(config, device, output),
        total_updates=total_steps * updates_per_step,
    )


def _engine(
    config: Config, device: Device, strategy: Strategy, models: Models, data: Data, folder: _Folder, gate: Gate
) -> Engine:
    """Make the rollout engine, which has the weights of the first step then."""
    weights = ShardedWeights(models.policy.model, strategy.whole) if strategy.shards else None
    run_id = folder.lock.run_id if folder.lock is not None else None
    engine = build_engine(config, models.policy, data.tokenizer, device, models.replica, gate, weights, run_id)
    engine.update_weights(folder.start)
    return engine


def _observer(config: Config, folder: _Folder, strategy: Strategy, total_steps: int) -> Observer:
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
    folder: _Folder,
    data: Data,
    update: PolicyUpdate,
    responses: ResponseSource,
    observer: Observer,
) -> Saver:
    """Return what writes checkpoints, with all that a resumed run is restored and compared with."""
    # Salts are drawn, and files may differ between hosts: all ranks save what rank 0 has.
    secrets, code = strategy.gather_objects((digests(written_of(config)), checksums(config)))[0]
    datasets = {"train": data.training, "validation": data.validation}
    fingerprints = {name: prompts.fingerprint for name, prompts in datasets.items() if prompts is not None}

    def state() -> dict[str, Any]:
        return {
            "sampler": responses.state(),
            "updates_done": update.updates_done,
            "skipped_in_a_row": update.skipped_in_a_row,
            "config": to_yaml(written),
            "secrets": secrets,
            "data": fingerprints,
            "code": code,
        }

    return Saver(
        folder.path / "checkpoints",
        strategy,
        device,
        keep=config.trainer.keep_checkpoints,
        asynchronous=config.trainer.save_async,
        state=state,
        extra_files=lambda: prefetched_batches.files_of(responses.waiting(), strategy.rank),
        tell=observer.note,
        moved=lambda: folder.lock.moved() if folder.lock is not None else None,
        timeout=config.trainer.process_group_timeout,
    )


def _raise_if_finished(config: Config, strategy: Strategy, allow_changes: bool) -> None:
    """Raise RunFinished on all ranks where rank 0, which looks, finds nothing left to do."""
    said = together(strategy, lambda: None if strategy.rank else already_finished(config, allow_changes=allow_changes))
    said = strategy.gather_objects(said)[0]
    if said is not None:
        strategy.close()
        raise RunFinished(said)


def token_budget(config: Config, device: Device, output: Path) -> TokenBudget:
    """Return the token budget of micro-batches, which a full memory makes smaller for this run."""
    least, tokens = longest_share(config), micro_batch_tokens(config, device.torch_device)
    return TokenBudget(tokens, least=least, device=device, folder=output)
