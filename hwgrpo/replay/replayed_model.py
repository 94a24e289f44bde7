"""The model with the weights before a captured step: from the capture, the run's checkpoint, or model.path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.config.schema import CorrectionConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_model_config, load_tokenizer, resolve_model_path
from hwgrpo.replay.replay_settings import ReplaySettings
from hwgrpo.training.captured_step import CapturedStep, entries_of, entry_places
from hwgrpo.training.checkpoint import checkpoint_files, restore, shard_files
from hwgrpo.training.model_setup import build_models
from hwgrpo.training.moving_reference import restore_reference
from hwgrpo.training.policy.auto_settings import attention_of, layout_of
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.setup import make_update
from hwgrpo.training.stages.capture import REFERENCE, number_parameters
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.policy_update import PolicyUpdate


@dataclass(frozen=True)
class Weights:
    """Where the weights before the step come from."""

    place: str
    has_states: bool
    """Whether the optimizer's states are there, too, or the update is the run's first."""
    reference: str | None
    """Why the reference model is not that of the step; None: it is."""


@dataclass(frozen=True)
class ReplayedModel:
    """A captured step's model on this machine."""

    captured: CapturedStep
    settings: ReplaySettings
    device: Device
    tokenizer: Any
    strategy: Single
    update: PolicyUpdate
    reference: Reference | None
    weights: Weights
    notes: tuple[str, ...]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return name -> parameter."""
        return dict(self.update.policy.model.named_parameters())


def build_replay(
    captured: CapturedStep, settings: ReplaySettings, device: Device, folder: Path, checkpoint: Path | None
) -> ReplayedModel:
    """Load the model, run its startup checks, and give it the weights before the step.

    Args:
        captured: the step.
        settings: of the replay; paths are absolute.
        device: the device, prepared.
        folder: for files of the replay.
        checkpoint: folder of a checkpoint of the step before; None: look for it in the run's folder.

    Raises:
        ConfigError: there are no weights, or they are not those before the step; the message says what is missing.
        CheckpointError: a checkpoint is damaged, or of another model.
    """
    config = settings.config
    resolve_model_path(config.model.path, weights=True)
    tokenizer = load_tokenizer(config.model)
    _check_architecture(captured, settings)
    strategy = Single(device.torch_device, device.comm_backend)
    attention = attention_of(config, device)
    models = build_models(config, device, strategy, tokenizer, attention, layout_of(config, device), samples=False)
    _check_shapes(captured, models.policy.model, config.model.path)
    update = make_update(config, device, strategy, models, folder, captured.facts["total_steps"])
    restore_update(captured, update)
    weights = _restore_weights(captured, settings, strategy, models.reference, checkpoint)
    _check_weights(captured, models.policy.model, weights)
    _check_reference(captured, models.reference, weights, config.model.path)
    notes = tuple(filter(None, (models.layout_reason,)))
    return ReplayedModel(captured, settings, device, tokenizer, strategy, update, models.reference, weights, notes)


def restore_update(captured: CapturedStep, update: PolicyUpdate) -> None:
    """Restore the state of the updates before the step: their number, coefficients, and the correction in force."""
    update.restore(captured.facts["before"])
    if captured.facts["correction"] is not None:
        update.apply_correction(CorrectionConfig(**captured.facts["correction"]))


def _check_architecture(captured: CapturedStep, settings: ReplaySettings) -> None:
    """Compare the size of the vocabulary before the weights are loaded."""
    path = settings.config.model.path
    vocabulary = getattr(load_model_config(settings.config.model).get_text_config(), "vocab_size", None)
    expected = captured.facts["vocabulary"]
    if vocabulary != expected:
        raise ConfigError(
            f"model.path={path!r} has a vocabulary of {vocabulary} tokens, and the model of step {captured.step} in "
            f"{captured.folder} has {expected}; name that model"
        )


def _check_shapes(captured: CapturedStep, model: Any, path: str) -> None:
    here = {name: tuple(p.shape) for name, p in model.named_parameters() if p.is_floating_point()}
    there = {each.name: each.shape for each in captured.parameters}
    for name in (*there, *here):
        if here.get(name) != there.get(name):
            raise ConfigError(
                f"model.path={path!r} is another model than that of step {captured.step} in {captured.folder}: "
                f"{name} has shape {_shown(here.get(name))} here, and {_shown(there.get(name))} there; name "
                "that model, or the same model.lora"
            )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "none, there is no such parameter" if shape is None else str(list(shape))


def _restore_weights(
    captured: CapturedStep,
    settings: ReplaySettings,
    strategy: Single,
    reference: Reference | None,
    checkpoint: Path | None,
) -> Weights:
    """Load the weights, and the optimizer's states where they are there."""
    config, before = settings.config, captured.step - 1
    shards = strategy.param_shards()
    shapes = {shard.name: shard.shape for shard in shards}
    moves = bool(config.algorithm.kl.sync_every) and reference is not None
    moved = "it has moved, and only a checkpoint has it (--checkpoint)" if moves else None
    if captured.facts["weights"] is not None and checkpoint is None:
        table = captured.facts["weights"]
        shard_files.check_parameters(captured.folder, table, shapes)
        shard_files.read(captured.folder, table, shards)
        strategy.refresh_from_shards()
        return Weights(str(captured.folder), True, moved if before >= config.algorithm.kl.sync_every else None)
    if before == 0 and checkpoint is None:
        return Weights(f"model.path={config.model.path!r}", True, None)
    folder = checkpoint
    if folder is None:
        root = captured.folder.resolve().parent.parent / "checkpoints"
        folder = checkpoint_files.folder_of(root, before)
    if checkpoint is not None or folder.is_dir():
        saved = restore.verify(folder.absolute())
        if saved.step != before:
            raise ConfigError(
                f"{folder} is a checkpoint of step {saved.step}; step {captured.step} needs that of {before}"
            )
        restore.restore(saved, shards, shapes)
        strategy.refresh_from_shards()
        if reference is not None:
            restore_reference(reference, saved, strategy, config.algorithm.kl)
        return Weights(str(folder), True, None)
    if settings.overrides("model.path"):
        why = "it is the model that the run began with, and model.path names a later one"
        return Weights(f"model.path={config.model.path!r}", False, why if reference is not None else None)
    raise ConfigError(
        f"the model before step {captured.step} is missing: {captured.folder} has no weights "
        f"(trainer.capture_weights=true writes them) and {folder} does not exist; name the run's checkpoint of step "
        f"{before} with --checkpoint FOLDER, or a model exported from it in float32 with model.path=FOLDER"
    )


def _check_weights(captured: CapturedStep, model: Any, weights: Weights) -> None:
    """Compare the captured entries of the weights: a frozen one may be held in another dtype here."""
    named = dict(model.named_parameters())
    for each in captured.parameters:
        gap = _weight_gap(named[each.name], each.before, getattr(torch, each.dtype))
        if gap is not None:
            raise ConfigError(
                f"the weights of {weights.place} are not those before step {captured.step} of {captured.folder}: "
                f"{each.name} differs by {gap:.2g}; name the model before that step, exported with "
                "--dtype float32, or its checkpoint with --checkpoint"
            )


def _check_reference(captured: CapturedStep, reference: Reference | None, weights: Weights, path: str) -> None:
    """Compare the captured entries of the reference model, where it is a copy, which is cast without rounding."""
    entries = captured.tensors.get(REFERENCE)
    if entries is None or reference is None or reference.kind != "copy" or weights.reference is not None:
        return
    named = number_parameters(reference.policy)
    counts = [len(entry_places(parameter.numel())) for parameter in named.values()]
    for (name, parameter), before in zip(named.items(), entries.split(counts), strict=True):
        gap = _weight_gap(parameter, before, parameter.dtype)
        if gap is not None:
            raise ConfigError(
                f"the reference model of model.path={path!r} is not that of step {captured.step} of "
                f"{captured.folder}: {name} differs by {gap:.2g}; name the model that the run began with"
            )


def _weight_gap(parameter: torch.nn.Parameter, before: torch.Tensor, dtype: torch.dtype) -> float | None:
    """Return the largest difference of entries from captured ones of a dtype, None if casts explain all of them."""
    if not torch.isfinite(before).all():
        return None
    gaps = (entries_of(parameter) - before).abs()
    eps = 0.0 if parameter.dtype == dtype else max(torch.finfo(each).eps for each in (parameter.dtype, dtype))
    return None if bool((gaps <= eps * before.abs()).all()) else float(gaps.max())
