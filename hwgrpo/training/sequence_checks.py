"""Checks for sequence and tensor parallelism: of a model's configuration, and a self-test of the loaded model."""

from __future__ import annotations

from typing import Any

import torch

from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.config import Config
from hwgrpo.config.derived import ranks_per_sequence
from hwgrpo.errors import ConfigError
from hwgrpo.models.layer_values import largest_value, layer_values
from hwgrpo.models.router import EXPERTS
from hwgrpo.models.tensor_parallel import reason_against_plan, tensor_parallel_error
from hwgrpo.training.policy.auto_settings import AttentionSelection, layers_beyond_attention
from hwgrpo.training.policy.layout_check import (
    PADDING_TOLERANCE,
    ExpectedStates,
    compute_unsharded_states,
    reason_against_layout,
)
from hwgrpo.training.policy.layouts import Layout
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.sequence_shard import SequenceGroup
from hwgrpo.training.update.flops import first_of

ROPES_OF_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that depend on a sequence's length, unknown to a rank that has only some of its tokens."""


def check_sequence_parallel(config: Config, model_config: Any, attention: AttentionSelection) -> None:
    """Check that a model supports the configured sequence or tensor parallelism, by its configuration.

    Args:
        config: the run's settings.
        model_config: the transformers configuration of the model.
        attention: the selected implementation.

    Raises:
        ConfigError: its heads, its layers or the loss do not support it.
    """
    size = ranks_per_sequence(config)
    if size == 1:
        return
    error = tensor_parallel_error if config.trainer.tensor_parallel_size > 1 else _sequence_parallel_error
    text = model_config.get_text_config()
    beyond = layers_beyond_attention(text)
    if beyond:
        kinds = ", ".join(beyond)
        raise error(size, f"tokens of a {text.model_type} model depend on each other beyond attention ({kinds})")
    names = {"attention heads": "num_attention_heads"}
    if config.trainer.tensor_parallel_size > 1:
        reason = reason_against_plan(getattr(text, "base_model_tp_plan", None))
        if reason is not None:
            raise error(size, f"{text.model_type}: {reason}")
        experts = first_of(text, EXPERTS)
        if experts:  # some plans do not cover them
            raise error(size, f"{text.model_type}: its {experts} experts would not be sharded")
        kv_heads = "num_key_value_heads" if largest_value(text, "num_key_value_heads") else "num_attention_heads"
        names |= {"key-value heads": kv_heads, "intermediate units": "intermediate_size"}
    counts = [(kind, count) for kind, name in names.items() for count in dict.fromkeys(layer_values(text, name))]
    for kind, count in counts:
        if not count or count % size:
            known = [each or 1 for _, each in counts]
            sizes = [divisor for divisor in range(2, size) if not any(each % divisor for each in known)]
            use = f"{' or '.join(map(str, sizes))}, or 1" if sizes else "1"
            raise error(size, f"it does not divide the model's {count or 'unknown number of'} {kind}", use)
    ropes = sorted(_rope_types(getattr(text, "rope_parameters", None)) & set(ROPES_OF_LENGTH))
    if ropes:
        raise error(size, f"rotary embeddings of the model depend on the sequence's length ({', '.join(ropes)})")
    if attention.loaded_as != "sdpa":
        raise error(size, f"{attention.line}: exchanging heads for tokens needs one that accepts masks as sdpa does")
    if build_loss(config.algorithm).scope == "batch":
        raise error(size, f"algorithm.loss.name={config.algorithm.loss.name!r} compares all tokens of a micro-batch")


def verify_sequence_parallel(
    policy: PolicyModel,
    layout: Layout,
    group: SequenceGroup,
    expected: ExpectedStates | None = None,
    device: torch.device | None = None,
) -> None:
    """Check on a few tokens that hidden states equal those of a single rank; all ranks of the group call it together.

    Args:
        policy: wrapped by the strategy.
        layout: layout of the rows.
        group: ranks that share the rows.
        expected: hidden states of unsharded layers; None: any rank can compute them, since layers are gathered.
        device: device that computes; None: that of the weights.

    Raises:
        ConfigError: they differ, or the model's attention cannot be replaced.
    """
    if group.size == 1:
        return
    expected = expected or compute_unsharded_states(policy, device)
    reason = reason_against_layout(policy, layout, expected, group, PADDING_TOLERANCE, device)
    if reason is not None:
        error = tensor_parallel_error if group.tensor else _sequence_parallel_error
        raise error(group.size, f"{type(policy.base).__name__}: {reason}")


def _rope_types(parameters: Any) -> set[str]:
    """Return the kinds of rotary embeddings; models with several kinds of layers have one dict per kind."""
    if not isinstance(parameters, dict):
        return set()
    own = parameters.get("rope_type")
    return {own} if isinstance(own, str) else {kind for each in parameters.values() for kind in _rope_types(each)}


def _sequence_parallel_error(size: int, reason: str, use: str = "1") -> ConfigError:
    return ConfigError(f"trainer.sequence_parallel_size={size}: {reason}; use trainer.sequence_parallel_size={use}")
