"""Resuming a run: select the checkpoint, compare its settings and data, and restore the state.

Any number of ranks and any strategy may resume: `checkpoint/shard_files.py` reads the shards that each rank needs.
Under `trainer.strategy=auto` the saved strategy stays (`planning/strategy_choice.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.agents.agent_rows import rows_of_agents
from hwgrpo.config import Config
from hwgrpo.config.derived import planned_steps
from hwgrpo.config.load import to_tree
from hwgrpo.config.schema import TrainerConfig
from hwgrpo.config.stored_settings import stored_tree
from hwgrpo.config.typed import hints_of, section_of
from hwgrpo.config.validate import check_resume
from hwgrpo.config.written_config import changed_values, shown_settings, written_of
from hwgrpo.data.prompts import PromptDataset, build_dataset
from hwgrpo.errors import CheckpointError, ConfigError, RunFinished
from hwgrpo.models.loading import load_image_prompts, load_tokenizer
from hwgrpo.models.lora import uses_lora
from hwgrpo.observe import summary
from hwgrpo.support.template_clock import present_date
from hwgrpo.training.checkpoint import checkpoint_files, manifest, rng_state
from hwgrpo.training.checkpoint import restore as checkpoints
from hwgrpo.training.code_files import checksums
from hwgrpo.training.feed import group_files
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.online_rewards import final_folders
from hwgrpo.training.run_folder import FolderLock, lock_folder_on_rank_0, reason_against_links
from hwgrpo.training.shared_setup import seed_everything
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks
from hwgrpo.training.update.policy_update import PolicyUpdate

REFUSED_ON_RESUME = (
    *("model.path", "model.revision", "model.tokenizer", "model.chat_template", "model.lora", "model.quantize"),
)
"""Settings that define the model of the saved parameters; a run with others does not resume."""
NOT_REPORTED = ("trainer.resume", "trainer.resume_check", "trainer.output_dir", "observe")
"""Settings that may change without a note when a run resumes."""
TEXT = "text_sha256"
"""Field of a fingerprint of data: the hash of what a model reads of it."""
IRRELEVANT_TO_WEIGHTS = (
    *("observe", "backend", "kernels", "rollout.server", "trainer.fsdp2", "trainer.deepspeed"),
    *("model.attention", "model.fused_modules", "model.layout", "model.gradient_checkpointing"),
    *("data.validation", "data.validation_split", "data.validation_max_rows"),
    *("rollout.max_sequences", "rollout.graphs", "rollout.gpu_memory_utilization", "rollout.kv_cache_gb"),
    *("rollout.sleep_mode", "rollout.max_model_len", "rollout.enforce_eager", "rollout.tensor_parallel_size"),
    *(
        "trainer.output_dir",
        "trainer.resume",
        "trainer.resume_check",
        "trainer.max_steps",
        "trainer.epochs",
        "trainer.strategy",
    ),
    *("trainer.sequence_parallel_size", "trainer.tensor_parallel_size", "trainer.tokens_per_micro_batch"),
    *("trainer.save_every", "trainer.save_async", "trainer.keep_checkpoints", "trainer.save_final_model"),
    *("trainer.validate_every", "trainer.validate_at_start", "trainer.validation_n", "trainer.validation_sampling"),
    *("trainer.capture_steps", "trainer.capture_weights", "trainer.profile_steps"),
    *("trainer.deterministic", "trainer.threads", "trainer.max_skipped_updates", "trainer.final_dtype"),
)
"""Settings for where and how a run computes, reports and saves: a finished run with others is still this run."""


def find_checkpoint(
    config: Config, output: Path, strategy: Strategy | None = None
) -> tuple[checkpoints.Checkpoint | None, list[str]]:
    """Return the checkpoint selected by `trainer.resume`, and notes on it for the user.

    Args:
        config: the run's settings.
        output: the run's folder.
        strategy: distributes the reading over its ranks, which all must call this; None: this process reads alone.

    Raises:
        ConfigError: the folder contains another run and `trainer.resume` is never, or a fixed setting changed.
        CheckpointError: a checkpoint set by path is damaged or missing.
    """
    checkpoint, notes = _choose_checkpoint(config, output, strategy)
    if checkpoint is not None:
        notes += _compare_settings(checkpoint, config)
        notes += [
            f"warning: {each}; the run continues with the present one" for each in _changed_code(checkpoint, config)
        ]
    return checkpoint, notes


def _choose_checkpoint(
    config: Config, output: Path, strategy: Strategy | None = None
) -> tuple[checkpoints.Checkpoint | None, list[str]]:
    resume = config.trainer.resume
    if resume == "never":
        if (output / "checkpoints").exists() or (output / "metrics.jsonl").exists():
            raise ConfigError(
                f"trainer.resume='never' and trainer.output_dir={str(output)!r} contains another run; "
                "set another folder, remove this one, or use trainer.resume=auto to continue it"
            )
        return None, []
    if resume == "auto":
        checkpoint, damaged = checkpoints.newest(output / "checkpoints", strategy)
        notes = [f"skipped a checkpoint: {problem}" for problem in damaged]
    else:
        check_resume(config)
        checkpoint, notes = checkpoints.verify(Path(resume).absolute(), strategy), []
    if checkpoint is not None:
        notes += filter(None, (checkpoint.note,))
    return checkpoint, notes


def compare_data(checkpoint: checkpoints.Checkpoint | None, **datasets: PromptDataset | None) -> list[str]:
    """Return a warning for each dataset that has changed since a checkpoint was saved.

    Args:
        checkpoint: the checkpoint to resume from; one without data fingerprints gives no warnings.
        datasets: the current `train` and `validation`.
    """
    changed = _changed_data(checkpoint, **datasets) if checkpoint else []
    return [f"warning: {each}; the run continues with the present one" for each in changed]


def _changed_data(checkpoint: checkpoints.Checkpoint, **datasets: PromptDataset | None) -> list[str]:
    saved, changed = checkpoint.manifest["state"].get("data", {}), []
    for name, dataset in datasets.items():
        if dataset is None or not saved.get(name):
            continue
        then, now = saved[name], dataset.fingerprint
        if any(then[key] != now[key] for key in ("rows", "sha256")):
            changed.append(
                f"data.{name}={dataset.name!r} has changed since the checkpoint: {_shown(then)} then, {_shown(now)} now"
            )
        elif TEXT in then and TEXT in now and then[TEXT] != now[TEXT]:  # older checkpoints have no text
            changed.append(
                f"the text of data.{name}={dataset.name!r}, which is the same, has changed since the checkpoint, with "
                f"the chat template, its options or the tokenizer: sha256 {then[TEXT][:12]} then, {now[TEXT][:12]} now"
            )
    return changed


def template_date(config: Config, checkpoint: checkpoints.Checkpoint | None) -> str:
    """Return the date that chat templates write: the setting, that of the run's first start, or the present.

    Args:
        config: the run's settings.
        checkpoint: the checkpoint to resume from; one that has no date leaves the present.
    """
    saved = None if checkpoint is None else checkpoint.manifest["state"].get("template_date")
    return config.data.template_date or saved or present_date()


def _training_data(config: Config, checkpoint: checkpoints.Checkpoint) -> PromptDataset | None:
    data = dataclasses.replace(config.data, template_date=template_date(config, checkpoint))
    tokenizer = load_tokenizer(config.model)
    images = load_image_prompts(config.model, tokenizer)
    return build_dataset(data, tokenizer, "train", rows_of_agents(config), images)


def _changed_code(checkpoint: checkpoints.Checkpoint, config: Config) -> list[str]:
    saved, now = checkpoint.manifest["state"].get("code", {}), checksums(config)
    return [
        f"the file of {key} has changed since the checkpoint: sha256 {saved[key][:12]} then, {now[key][:12]} now"
        for key in sorted(saved.keys() & now.keys())
        if saved[key] != now[key] and not key.startswith("observe.")
    ]


def _shown(fingerprint: Mapping[str, Any]) -> str:
    return f"{fingerprint['rows']:,} rows (sha256 {fingerprint['sha256'][:12]})"


def already_finished(
    config: Config,
    *,
    open_data: Callable[[checkpoints.Checkpoint], PromptDataset | None] | None = None,
    allow_changes: bool = False,
) -> str | None:
    """Return a message that a run is finished and how to continue it; None if it is not finished.

    It is finished when its last checkpoint has all configured steps and all outputs of `finish` exist: a run that was
    killed before that must be started again.

    Args:
        config: checked settings.
        open_data: returns the training prompts of a run that goes on from a checkpoint, or None if they are missing;
            called only if the run may be finished.
        allow_changes: a run trained with other settings or data also counts as finished.

    Raises:
        ConfigError: the finished run was trained with other settings or data, which the message lists. Or as
            `find_checkpoint` does.
        CheckpointError, DataError: as `find_checkpoint` and `build_dataset` do.
    """
    t = config.trainer
    output = Path(t.output_dir)
    closing = summary.read_summary(output)
    models = [output / "final"] if t.save_final_model else []
    if t.save_final_model and uses_lora(config.model.lora):
        models.append(output / "final-adapter")
    models += [output / name for name in final_folders(config.reward) if t.save_final_model]
    if closing.get("status") != "completed" or not all(model.is_dir() for model in models):
        return None
    checkpoint, notes = _choose_checkpoint(config, output)
    if checkpoint is None or checkpoint.step != closing.get("steps"):
        return None
    if checkpoint.folder.resolve().parent != (output / "checkpoints").resolve():  # another run's
        return None
    changed = [
        f"{key} {then} -> {now}"
        for key, (then, now) in changed_settings(checkpoint, config).items()
        if not _under(key, IRRELEVANT_TO_WEIGHTS)
    ]
    if checkpoint.step < t.max_steps:
        return None
    training = (open_data or (lambda saved: _training_data(config, saved)))(checkpoint)
    planned = t.max_steps if training is None else planned_steps(config, len(training))
    if checkpoint.step < planned:
        return None
    changed += _changed_code(checkpoint, config) + _changed_data(checkpoint, train=training)
    if changed and not allow_changes:
        raise ConfigError(
            f"{output} contains a finished run of other settings, and nothing would be trained: "
            f"{', '.join(changed)}; to train with these, set trainer.output_dir to another folder; "
            "to keep it as it is, restore its settings, or pass --allow-finished"
        )
    notes += _changes(checkpoint, config) + compare_data(checkpoint, train=training)
    key, value = ("trainer.max_steps", t.max_steps) if t.max_steps else ("trainer.epochs", t.epochs)
    done = f"{checkpoint.step} of {planned} steps are done"
    if checkpoint.step > planned:
        done = f"{checkpoint.step} steps are done, {key}={value} needs {planned}"
    saved = f", the model is in {' and '.join(map(str, models))}" if models else ""
    return "\n".join(
        [
            f"{output} is finished: {done}{saved}. Nothing was trained.",
            f"To continue, set {key} to more than {max(value, checkpoint.step) if t.max_steps else value}; "
            "to train from step 0, set trainer.output_dir to another folder.",
            *(f"Note: {note}" for note in notes),
        ]
    )


def restore(
    checkpoint: checkpoints.Checkpoint, update: PolicyUpdate, source: PromptSource, strategy: Strategy
) -> list[str]:
    """Restore parameters, optimizer states and data position from a checkpoint; `restore_generators` comes last.

    Returns:
        Notes on state that could not be restored exactly.

    Raises:
        CheckpointError: the model has other trainable parameters, or a file cannot be read any more; on all ranks.
    """
    shards = strategy.param_shards()
    shapes = {shard.name: shard.shape for shard in shards}
    raise_on_all_ranks(strategy, lambda: checkpoints.restore(checkpoint, shards, shapes))
    strategy.refresh_from_shards()
    state = checkpoint.manifest["state"]
    source.restore(state["sampler"])
    update.restore(state)
    return raise_on_all_ranks(
        strategy, lambda: group_files.unused_note(checkpoint, update.config.algorithm.filter_groups)
    )


def restore_generators(
    checkpoint: checkpoints.Checkpoint | None, config: Config, strategy: Strategy, device: Device
) -> list[str]:
    """Restore the random state of a checkpoint, or give each rank a seed of its own (for dropout).

    It is the last part of the set-up: the others may draw, as some packages do when they are imported.

    Returns:
        A note if the state could not be restored exactly.

    Raises:
        CheckpointError: the file cannot be read any more; on all ranks.
    """
    rank, step, saved = strategy.rank, 0, None
    if checkpoint is not None:
        step = checkpoint.step
        saved = raise_on_all_ranks(strategy, lambda: checkpoints.load_rng(checkpoint, rank))
    if saved is None:  # a first start, or written by fewer ranks: a separate random stream, not another rank's
        seed_rank(device, config, rank, step)
        return []
    note = rng_state.restore(saved, device, _rank_seed(config.trainer, rank, step))
    return [note] if note else []


def seed_rank(device: Device, config: Config, rank: int, step: int = 0) -> None:
    """Seed each rank differently, after the model is made the same on all of them."""
    if rank or step:
        seed_everything(device, _rank_seed(config.trainer, rank, step))


def _rank_seed(trainer: TrainerConfig, rank: int, step: int) -> int:
    generator = torch.Generator().manual_seed(trainer.seed)
    offsets = torch.randint(2**40, (2,), generator=generator).tolist()
    return (trainer.seed + rank * offsets[0] + step * offsets[1]) % 2**63  # what generators accept


def _compare_settings(checkpoint: checkpoints.Checkpoint, config: Config) -> list[str]:
    for key, (saved, now) in changed_settings(checkpoint, config).items():
        if _under(key, REFUSED_ON_RESUME) and not _is_same_object(saved, now):
            raise CheckpointError(
                f"{key}={now}, but {checkpoint.folder} was saved with {saved}; restore it, or "
                "start a new run with another trainer.output_dir"
            )
        if key == "optim.name" and "'muon'" in (saved, now):
            raise CheckpointError(
                f"{key}={now}, but {checkpoint.folder} was saved with {saved}, whose states it cannot use; "
                "restore it, or start a new run with another trainer.output_dir"
            )
    return _changes(checkpoint, config)


def _is_same_object(saved: str, now: str) -> bool:
    """Return whether two folders hold the same given object: `objects/KIND-HASH`, in any run's folder."""
    return "/objects/" in saved and saved.rpartition("/objects/")[2] == now.rpartition("/objects/")[2]


def _changes(checkpoint: checkpoints.Checkpoint, config: Config) -> list[str]:
    """Return a line with all changed settings, if there are any."""
    changed = changed_settings(checkpoint, config).items()
    changes = [f"{key} {saved} -> {now}" for key, (saved, now) in changed if _is_reported(key, config)]
    saved_digests = checkpoint.manifest["state"].get("secrets", {})
    changes += [f"{key} (its value, not shown)" for key in changed_values(saved_digests, written_of(config))]
    return ["changed since the checkpoint: " + ", ".join(changes)] if changes else []


def _is_reported(key: str, config: Config) -> bool:
    if key == "trainer.max_steps":
        return config.optim.schedule != "constant"  # the learning rate falls over so many steps
    return not _under(key, NOT_REPORTED)


def changed_settings(checkpoint: checkpoints.Checkpoint, config: Config) -> dict[str, tuple[str, str]]:
    """Return the settings that have changed since a checkpoint was saved, sorted.

    Returns:
        Key -> (saved value, current value), with secrets masked.
    """
    # A setting newer than the checkpoint has its default there.
    trees = _with_defaults(stored_tree(checkpoint.manifest["state"]["config"]), Config), to_tree(config)
    then, now = map(_flat, trees)
    changed = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
    shown = [_flat(shown_settings(tree, Config)) for tree in trees]
    return {key: (repr(shown[0].get(key)), repr(shown[1].get(key))) for key in changed}


def _with_defaults(tree: Any, section: type) -> Any:
    """Return settings as plain containers, with a dataclass's defaults for missing ones."""
    hints = hints_of(section)
    full = dict(tree)
    for field in dataclasses.fields(section):
        inner = section_of(hints[field.name])
        default: Any = field.default
        if default is dataclasses.MISSING:
            assert field.default_factory is not dataclasses.MISSING
            default = field.default_factory()
        if inner is None:
            full.setdefault(field.name, default)
        elif isinstance(default, list):
            full[field.name] = [_with_defaults(each, inner) for each in full.get(field.name, default)]
        else:
            full[field.name] = _with_defaults(full.get(field.name, {}), inner)
    return full


def _under(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value, with an index in the keys of listed sections."""
    if isinstance(values, Mapping):
        inner: Any = values.items()
    elif isinstance(values, list) and values and all(isinstance(value, Mapping) for value in values):
        inner = enumerate(values)
    else:
        return {prefix: values}
    flat: dict[str, Any] = {}
    for key, value in inner:
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


@dataclasses.dataclass(frozen=True)
class LockedFolder:
    """A run's folder, locked by this run."""

    path: Path
    lock: FolderLock | None
    """None on ranks other than rank 0."""
    checkpoint: checkpoints.Checkpoint | None
    """Checkpoint to resume from."""
    notes: list[str]

    @property
    def start(self) -> int:
        """Steps finished before this start."""
        return self.checkpoint.step if self.checkpoint else 0


def open_folder(
    written: Config,
    path: Path,
    strategy: Strategy,
    undo: ExitStack,
    allow_finished: bool,
    *,
    command: str = "train",
    open_data: Callable[[checkpoints.Checkpoint], PromptDataset | None] | None = None,
) -> LockedFolder:
    """Lock the run's folder, then select the checkpoint to resume from.

    In this order, because another run that still has the lock may save a checkpoint in between.

    Args:
        written: the settings, with the user's own paths.
        path: the folder.
        strategy: connects the ranks.
        undo: receives the callback that unlocks the folder.
        allow_finished: a finished run of other settings or data is not an error.
        command: the command of `hwgrpo` that runs.
        open_data: see `already_finished`.

    Raises:
        ConfigError: the checkpoint is one of another command, or the final model would replace a symbolic link.
        RunFinished: nothing is left to do.
    """
    lock = lock_folder_on_rank_0(path, strategy, final_folders(written.reward))
    if lock is not None:
        undo.callback(lock.close)
    raise_on_all_ranks(strategy, lambda: None if strategy.rank else check_command(written.trainer, path, command))
    _raise_if_finished(written, strategy, allow_finished, open_data)
    linked = strategy.gather_objects(reason_against_saving(written, path))[0]
    if linked is not None:
        raise ConfigError(linked)
    checkpoint, notes = find_checkpoint(written, path, strategy)
    if lock is not None and checkpoint is not None:
        lock.keep()
    if lock is not None and lock.note is not None:
        notes = [lock.note, *notes]
    return LockedFolder(path, lock, checkpoint, list(notes))


def reason_against_saving(config: Config, output: Path) -> str | None:
    """Return an error if a run that is not finished would replace a symbolic link at its end; None if not."""
    return reason_against_links(output, final_folders(config.reward)) if config.trainer.save_final_model else None


def check_command(trainer: TrainerConfig, output: Path, command: str) -> None:
    """Check that the checkpoint to resume from is one of this command.

    Raises:
        ConfigError: it is one of another command, whose optimizer states and data are others.
    """
    resume = trainer.resume
    if resume == "never":
        return
    folders = [path for _, path in checkpoint_files.folders(output / "checkpoints")]
    for folder in [Path(resume)] if resume != "auto" else folders:
        try:
            saved = manifest.read(folder).content["state"].get("command", "train")
        except CheckpointError:  # reported when its files are verified
            continue
        if saved != command:
            raise ConfigError(
                f"{folder} is a checkpoint of `hwgrpo {saved}`, which `hwgrpo {command}` cannot continue; set another "
                f"trainer.output_dir, and model.path={output / 'final'} to start from its model"
            )


def _raise_if_finished(
    config: Config,
    strategy: Strategy,
    allow_changes: bool,
    open_data: Callable[[checkpoints.Checkpoint], PromptDataset | None] | None,
) -> None:
    """Raise RunFinished on all ranks if rank 0 finds the run finished; its settings may differ with `allow_changes`."""
    message = raise_on_all_ranks(
        strategy,
        lambda: None if strategy.rank else already_finished(config, open_data=open_data, allow_changes=allow_changes),
    )
    message = strategy.gather_objects(message)[0]
    if message is not None:
        strategy.close()
        raise RunFinished(message)
