"""Checks before a model is loaded, shared by a run and its dry run.

Add checks of a run here, not in `setup` or `dry_run`, so that a dry run rejects everything that the run would reject.
Checks that need the loaded model follow in `model_setup.build_models`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from hwgrpo_backends import Backend
from hwgrpo_backends.device import Device
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.catalog import STRATEGIES
from hwgrpo.config import Config
from hwgrpo.config.algorithm_rules import check_declared
from hwgrpo.data.prompts import PromptDataset, build_dataset
from hwgrpo.errors import ConfigError
from hwgrpo.models.gguf import conversion_note
from hwgrpo.models.loading import check_embeddings, check_trains_all_parts, resolve_model_path
from hwgrpo.models.router import check_router_loss
from hwgrpo.models.saving import check_saving
from hwgrpo.models.stored_quantization import check_stored, dequantization_note
from hwgrpo.models.weight_files import check_weight_files
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rollout.engine_kind import check_engine
from hwgrpo.rollout.vllm.vllm_settings import check_head_size, check_sleep
from hwgrpo.training.length_check import check_length
from hwgrpo.training.module_fusion import choose_modules
from hwgrpo.training.optional_checks import assumed_selections, check_estimator, make_without_weights
from hwgrpo.training.policy.auto_settings import (
    AttentionSelection,
    choose_attention,
    choose_dtype,
    choose_layout,
    choose_strategy,
    layout_note,
)
from hwgrpo.training.policy.layouts import Layout
from hwgrpo.training.reward_setup import build_rewards
from hwgrpo.training.sequence_checks import check_sequence_parallel
from hwgrpo.training.shared_setup import choose_kernels
from hwgrpo.training.strategies.strategy_kind import StrategyKind


@dataclass(frozen=True)
class Prompts:
    """A run's prompts with their tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    training: PromptDataset
    validation: PromptDataset | None


@dataclass(frozen=True)
class Data(Prompts):
    """A run's prompts with their rewards."""

    rewards: RewardPipeline


@dataclass(frozen=True)
class ResolvedSettings:
    """The settings with `auto` resolved."""

    dtype: torch.dtype
    attention: AttentionSelection
    layout: Layout
    layout_note: str | None
    """Why rows are padded, if that is a fallback."""
    notes: tuple[str, ...]
    """Further notes for the user."""


def open_data(config: Config, tokenizer: PreTrainedTokenizerBase, rank: int = 0, device: Device | None = None) -> Data:
    """Open the prompts and the reward functions that score them.

    Args:
        config: checked settings.
        tokenizer: the model's.
        rank: this process's rank, for the rewards' random numbers.
        device: this process's device, for rewards with models of their own; None: the CPU.

    Raises:
        ConfigError, DataError: as `build_dataset` and `build_rewards` do.
    """
    training, validation = (build_dataset(config.data, tokenizer, split) for split in ("train", "validation"))
    assert training is not None
    return Data(tokenizer, training, validation, build_rewards(config, training, validation, rank, tokenizer, device))


def check_start(
    config: Config,
    backend: Backend,
    settings: PreTrainedConfig,
    *,
    device: Device | None,
    data: Prompts | None,
    resumes: bool = False,
) -> ResolvedSettings:
    """Run all checks that need no weights of the model, and return the settings with `auto` resolved.

    Args:
        config: checked settings.
        backend: the device family.
        settings: the model's transformers configuration.
        device: the run's device; None: it is not here, and its properties are assumed.
        data: the prompts; None if they are not here.
        resumes: the run continues from a checkpoint, with the parts of the model that it began with.

    Raises:
        ConfigError: with the wrong value and its remedy.
    """
    if not resumes:
        check_trains_all_parts(config.model, settings)
    check_declared(config.algorithm)
    check_estimator(config)
    build_loss(config.algorithm)  # a loss, KL or correction of the user's own may not take what is set
    choose_kernels(config, backend)
    choose_modules(config, backend)
    check_router_loss(config.model.router_loss_coef, settings)
    check_stored(config.model.path, settings)
    folder = Path(resolve_model_path(config.model.path))
    if folder.is_dir():
        check_weight_files(config.model.path, folder)
    model = make_without_weights(config.model, settings)
    if config.trainer.save_final_model:
        check_saving(model, config.model, data.tokenizer if data is not None else None)
    if device is None:
        dtype, attention = assumed_selections(config, backend, settings)
    else:
        dtype = choose_dtype(config, device)
        attention = choose_attention(config, backend, dtype, settings, device.arch)
    check_sequence_parallel(config, settings, attention)
    check_head_size(config, settings, on_host=backend.is_host)
    check_sleep(config, settings, backend)
    layout = choose_layout(config, settings, attention.loaded_as)
    if data is not None:
        check_length(config, data.training, data.validation, settings=settings)
        check_embeddings(getattr(settings.get_text_config(), "vocab_size", None), data.tokenizer)
    notes = tuple(filter(None, (dequantization_note(settings), conversion_note(config.model.path))))
    return ResolvedSettings(dtype, attention, layout, layout_note(config, settings, attention.loaded_as), notes)


def missing_requirements(config: Config, device: Device) -> list[str]:
    """Return the run's unmet requirements on this machine: packages, programs, variables, processes."""
    strategy: StrategyKind = STRATEGIES.load(choose_strategy(config))
    checks = (
        lambda: strategy.check_host(config, device.torch_device),
        lambda: check_engine(config),
    )
    missing = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            missing.append(str(error))
    return missing
