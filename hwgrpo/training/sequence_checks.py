"""Whether ranks may share a model's sequences: what its configuration says before it is loaded, and a trial after."""

from __future__ import annotations

from typing import Any

import torch

from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.config import Config
from hwgrpo.config.derived import ranks_per_sequence
from hwgrpo.errors import ConfigError
from hwgrpo.models.tensor_parallel import reason_against_plan, tensor_parallel_error
from hwgrpo.training.policy.auto_settings import AttentionSelection, layers_beyond_attention
from hwgrpo.training.policy.layout_check import PADDING_TOLERANCE, reason_against_layout
from hwgrpo.training.policy.layouts import Layout
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.sequence_group import SequenceGroup
from hwgrpo.training.update.flops import EXPERTS, first_of

ROPES_OF_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that depend on how long a sequence is, which a rank with the first of its tokens cannot see."""


def check_sequence_parallel(config: Config, model_config: Any, attention: AttentionSelection) -> None:
    """Check by a model's configuration that as many ranks as the settings say can share its sequences.

    Args:
        config: the run's settings.
        model_config: the transformers configuration of the model.
        attention: the implementation chosen.

    Raises:
        ConfigError: its heads or its layers do not allow it, or the loss does not.
    """
    size = ranks_per_sequence(config)
    if size == 1:
        return
    refused = tensor_parallel_error if config.trainer.tensor_parallel_size > 1 else _shared
    text = model_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    beyond = layers_beyond_attention(text)
    if beyond:
        raise refused(size, f"tokens of a {text.model_type} model meet by more than attention ({', '.join(beyond)})")
    counts = {"attention heads": heads}
    if config.trainer.tensor_parallel_size > 1:
        obstacle = reason_against_plan(getattr(text, "base_model_tp_plan", None))
        if obstacle is not None:
            raise refused(size, f"{text.model_type}: {obstacle}")
        experts = first_of(text, EXPERTS)
        if experts:  # some plans leave them out
            raise refused(size, f"{text.model_type}: its {experts} experts would not be sharded")
        counts["key-value heads"] = getattr(text, "num_key_value_heads", None) or heads
        counts["intermediate units"] = getattr(text, "intermediate_size", None)
    for what, count in counts.items():
        if not count or count % size:
            every = [each or 1 for each in counts.values()]
            fitting = [divisor for divisor in range(2, size) if not any(each % divisor for each in every)]
            use = f"{' or '.join(map(str, fitting))}, or 1" if fitting else "1"
            raise refused(size, f"it does not divide the model's {count or 'unknown number of'} {what}", use)
    ropes = sorted(_rope_types(getattr(text, "rope_parameters", None)) & set(ROPES_OF_LENGTH))
    if ropes:
        raise refused(size, f"rotary embeddings of the model depend on the sequence's length ({', '.join(ropes)})")
    if attention.loaded_as != "sdpa":
        raise refused(size, f"{attention.line}: exchanging heads for tokens needs one that accepts masks as sdpa does")
    if build_loss(config.algorithm).scope == "batch":
        raise refused(size, f"algorithm.loss.name={config.algorithm.loss.name!r} compares all tokens of a micro-batch")


def self_test_sequence_parallel(
    policy: PolicyModel,
    layout: Layout,
    group: SequenceGroup,
    states: torch.Tensor | None = None,
    device: torch.device | None = None,
) -> None:
    """Try on a few tokens that hidden states are those of one rank alone; all ranks of the group call it together.

    Args:
        policy: as the strategy holds it.
        layout: of rows.
        group: of ranks that share them.
        states: what one rank alone has found (`compute_unsharded_states`), where layers are cut over the group.
        device: where it computes; None: where its weights are.

    Raises:
        ConfigError: they are not, or the model does not let its attention be replaced.
    """
    if group.size == 1:
        return
    obstacle = reason_against_layout(policy, layout, group, PADDING_TOLERANCE, states, device)
    if obstacle is not None:
        raise (tensor_parallel_error if group.tensor else _shared)(
            group.size, f"{type(policy.base).__name__}: {obstacle}"
        )


def _rope_types(parameters: Any) -> set[str]:
    """Return the kinds of rotary embeddings; models with several kinds of layers have one dict for each."""
    if not isinstance(parameters, dict):
        return set()
    own = parameters.get("rope_type")
    return {own} if isinstance(own, str) else {kind for each in parameters.values() for kind in _rope_types(each)}


def _shared(size: int, why: str, use: str = "1") -> ConfigError:
    return ConfigError(f"trainer.sequence_parallel_size={size}: {why}; use trainer.sequence_parallel_size={use}")
