"""Checks before a model is loaded that a plain run does without: servers, adapters, devices that are not here."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hwgrpo_backends import Backend
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hwgrpo.algorithms.token_advantages import check_arguments, check_token_level
from hwgrpo.config import Config
from hwgrpo.config.schema import ModelConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models.attention_implementations import is_fused, reason_model_cannot_use
from hwgrpo.models.lora import apply_lora, uses_lora, without_weights
from hwgrpo.rollout.engine_kind import check_running_server
from hwgrpo.training.policy.auto_settings import AttentionSelection
from hwgrpo.training.strategies.strategy import Strategy


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


def check_estimator(config: Config) -> None:
    """Check that the other settings fit what the advantage estimator returns and reads, also one of the user's own.

    Raises:
        ConfigError: as `check_token_level` and `check_arguments` do.
    """
    check_token_level(config.algorithm)
    check_arguments(config.algorithm.advantage)


def make_without_weights(
    config: ModelConfig, settings: PreTrainedConfig, auto_class: Any = AutoModelForCausalLM
) -> Any:
    """Return the run's model with its adapters on the meta device; None for code that cannot be run there.

    Args:
        config: the run's `model` settings.
        settings: the model's transformers configuration.
        auto_class: transformers' class that makes the model.

    Raises:
        ConfigError: as `apply_lora` does.
    """
    lora = uses_lora(config.lora)
    with torch.random.fork_rng(devices=[]), without_weights():  # keeps the run's random numbers
        try:
            model = auto_class.from_config(copy.deepcopy(settings), trust_remote_code=config.trust_remote_code)
        except Exception:  # code of the model's own, which reads values of tensors
            if lora:
                raise
            return None
        return apply_lora(model, config.lora) if lora else model


def assumed_selections(config: Config, backend: Backend, settings: Any) -> tuple[torch.dtype, AttentionSelection]:
    """Return the expected compute dtype and attention of a device that is not here."""
    wanted, attention = config.model.dtype, config.model.attention
    usual = torch.float32 if backend.is_host else torch.bfloat16
    dtype = usual if wanted == "auto" else getattr(torch, wanted)
    if attention == "auto":
        attention = "eager" if reason_model_cannot_use("sdpa", settings) else "sdpa"
    return dtype, AttentionSelection(attention, is_fused(attention, backend))
