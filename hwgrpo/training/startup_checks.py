"""Checks before a model is loaded, shared by a run and its dry run.

Add checks of a run here, not in `setup` or `dry_run`, so that a dry run rejects everything that the run would reject.
Checks that need the loaded model follow in `model_setup.build_models`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends import Backend
from hwgrpo_backends.device import Device
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hwgrpo.agents.agent_rows import rows_of_agents
from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.algorithms.token_advantages import check_arguments, check_token_level
from hwgrpo.catalog import STRATEGIES
from hwgrpo.config import Config
from hwgrpo.config.algorithm_rules import check_declared
from hwgrpo.config.schema import AlgorithmConfig, ModelConfig
from hwgrpo.data.prompts import PromptDataset, build_dataset
from hwgrpo.errors import ConfigError
from hwgrpo.models.attention_implementations import is_fused, reason_model_cannot_use
from hwgrpo.models.gguf import conversion_note
from hwgrpo.models.loading import (
    auto_class,
    check_embeddings,
    check_trains_all_parts,
    load_image_prompts,
    load_model_config,
    resolve_model_path,
)
from hwgrpo.models.lora import apply_lora, uses_lora, without_weights
from hwgrpo.models.router import check_router_loss
from hwgrpo.models.saving import check_saving
from hwgrpo.models.stored_quantization import check_stored, dequantization_note
from hwgrpo.models.weight_files import check_weight_files
from hwgrpo.models.windows import rope_switches_at
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rollout.engine_kind import check_engine, check_running_server
from hwgrpo.rollout.vllm.vllm_settings import check_head_size, check_images, check_sleep
from hwgrpo.training.module_fusion import choose_modules
from hwgrpo.training.policy.auto_settings import (
    AttentionSelection,
    choose_attention,
    choose_dtype,
    choose_layout,
    choose_strategy,
    layout_note,
    may_use_lengths,
)
from hwgrpo.training.policy.layouts import Layout
from hwgrpo.training.reward_setup import build_rewards
from hwgrpo.training.sequence_checks import check_sequence_parallel
from hwgrpo.training.shared_setup import choose_kernels
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.strategies.strategy_kind import StrategyKind
from hwgrpo.training.vision_checks import check_vision


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
    """Why `auto` is not grouped rows."""
    notes: tuple[str, ...]
    """Further notes for the user."""


def open_data(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    rank: int = 0,
    device: Device | None = None,
    settings: PreTrainedConfig | None = None,
) -> Data:
    """Open the prompts and the reward functions that score them.

    Args:
        config: checked settings.
        tokenizer: the model's.
        rank: this process's rank, for the rewards' random numbers.
        device: this process's device, for rewards with models of their own; None: the CPU.
        settings: the model's configuration; None reads it.

    Raises:
        ConfigError, DataError: as `build_dataset` and `build_rewards` do.
    """
    change, images = rows_of_agents(config), load_image_prompts(config.model, tokenizer, settings)
    training, validation = (
        build_dataset(config.data, tokenizer, each, change, images) for each in ("train", "validation")
    )
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
    _check_estimator(config.algorithm)
    build_loss(config.algorithm)  # a loss, KL or correction of the user's own may not take what is set
    choose_kernels(config.kernels, backend)
    choose_modules(config.model, backend)
    check_router_loss(config.model.router_loss_coef, settings)
    check_stored(config.model.path, settings)
    folder = Path(resolve_model_path(config.model.path))
    if folder.is_dir():
        check_weight_files(config.model.path, folder)
    model = make_without_weights(config.model, settings)
    if config.trainer.save_final_model:
        check_saving(model, config.model, data.tokenizer if data is not None else None)
    if device is None:
        dtype, attention = assumed_selections(config.model, backend, settings)
    else:
        dtype = choose_dtype(config.model.dtype, device)
        attention = choose_attention(config, backend, dtype, settings, device.arch)
    check_vision(config, settings)
    check_sequence_parallel(config, settings, attention)
    check_head_size(config.rollout, config.model.path, settings, on_host=backend.is_host)
    check_sleep(config.rollout, config.model.path, settings, backend)
    check_images(config.rollout, config.model.path, settings, backend)
    by_lengths = may_use_lengths(config, settings, dtype, backend.device_type)
    layout = choose_layout(config, settings, attention.loaded_as, by_lengths=by_lengths)
    if data is not None:
        check_length(config, data.training, data.validation, settings=settings)
        check_embeddings(getattr(settings.get_text_config(), "vocab_size", None), data.tokenizer)
    notes = tuple(filter(None, (dequantization_note(settings), conversion_note(config.model.path))))
    note = layout_note(config, settings, attention.loaded_as, by_lengths=by_lengths)
    return ResolvedSettings(dtype, attention, layout, note, notes)


def missing_requirements(config: Config, device: Device) -> list[str]:
    """Return the run's unmet requirements on this machine: packages, programs, variables, processes."""
    name = choose_strategy(config.trainer.strategy)
    strategy: StrategyKind = STRATEGIES.load(name)
    checks = (
        lambda: strategy.check_host(config, device.torch_device),
        lambda: check_engine(config),
        lambda: _check_capture(config, name),
    )
    missing = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            missing.append(str(error))
    return missing


def _check_capture(config: Config, strategy: str) -> None:
    ulysses = config.trainer.sequence_parallel_size > 1
    if config.trainer.capture_steps and (strategy not in ("single", "ddp") or ulysses):
        raise ConfigError(
            f"trainer.capture_steps={config.trainer.capture_steps}: steps are captured where a rank has all weights "
            f"and its own sequences, with trainer.strategy=single or ddp, and this run has {strategy!r}"
            f"{' and sequences that ranks share (trainer.sequence_parallel_size)' if ulysses else ''}; change that, or "
            "leave capture_steps out"
        )


def require_running_server(config: Config, strategy: Strategy) -> None:
    """Check on rank 0 that an external rollout server is running.

    A dry run does not check it: the server may be started later.

    Raises:
        ConfigError: it is not running or rejects the token; on all ranks.
    """
    problem = None
    if strategy.rank == 0:
        try:
            check_running_server(config)
        except ConfigError as error:
            problem = str(error)
    problem = strategy.gather_objects(problem)[0]
    if problem is not None:
        raise ConfigError(problem)


def _check_estimator(algorithm: AlgorithmConfig) -> None:
    """Check that the other settings fit what the advantage estimator returns and reads, also one of the user's own.

    Raises:
        ConfigError: as `check_token_level` and `check_arguments` do.
    """
    check_token_level(algorithm)
    check_arguments(algorithm.advantage)


def make_without_weights(config: ModelConfig, settings: PreTrainedConfig, kind: Any = None) -> Any:
    """Return the run's model with its adapters on the meta device; None for code that cannot be run there.

    Args:
        config: the run's `model` settings.
        settings: the model's transformers configuration.
        kind: transformers' class that makes the model; None: of a causal LM, with all of its parts.

    Raises:
        ConfigError: as `apply_lora` does.
    """
    lora = uses_lora(config.lora)
    with torch.random.fork_rng(devices=[]), without_weights():  # keeps the run's random numbers
        try:
            model = (kind or auto_class(settings)).from_config(
                copy.deepcopy(settings), trust_remote_code=config.trust_remote_code
            )
        except Exception:  # code of the model's own, which reads values of tensors
            if lora:
                raise
            return None
        return apply_lora(model, config.lora) if lora else model


def assumed_selections(model: ModelConfig, backend: Backend, settings: Any) -> tuple[torch.dtype, AttentionSelection]:
    """Return the expected compute dtype and attention of a device that is not here."""
    wanted, attention = model.dtype, model.attention
    usual = torch.float32 if backend.is_host else torch.bfloat16
    dtype = usual if wanted == "auto" else getattr(torch, wanted)
    if attention == "auto":
        attention = "eager" if reason_model_cannot_use("sdpa", settings) else "sdpa"
    return dtype, AttentionSelection(attention, is_fused(attention, backend))


def check_length(config: Config, *datasets: PromptDataset | None, settings: PreTrainedConfig | None = None) -> None:
    """Check that the longest prompt and response fit the model's positions, and do not change its rotary embeddings.

    Args:
        config: the run's settings.
        datasets: training and validation prompts.
        settings: the model's transformers configuration; None: read it.

    Raises:
        ConfigError: one of these is not so.
    """
    settings = settings or load_model_config(config.model)
    positions = getattr(settings.get_text_config(), "max_position_embeddings", None)
    longest = max(data.longest for data in datasets if data is not None)
    response = config.rollout.max_response_tokens
    if positions is not None and longest + response > positions:
        raise ConfigError(
            f"rollout.max_response_tokens={response}: with the longest prompt ({longest} tokens) a sequence can be "
            f"{longest + response} tokens long, but model.path={config.model.path!r} has {positions} positions; use at "
            f"most {positions - longest}, or lower data.max_prompt_tokens"
        )
    switch = rope_switches_at(settings)
    if switch is not None and longest + response > switch:
        # the log-probs of a short sequence would depend on the other sequences in its batch, and cached keys on timing
        raise ConfigError(
            f"rollout.max_response_tokens={response}: with the longest prompt ({longest} tokens) a sequence can be "
            f"{longest + response} tokens long, but the rotary embeddings of model.path={config.model.path!r} "
            f"(longrope) change for all tokens of a batch that has more than {switch}; use at most "
            f"{switch - longest}, or lower data.max_prompt_tokens"
        )
