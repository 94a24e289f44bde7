"""The models of a run, from the settings to where they train: the policy, its reference, the copy that samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.config import Config
from hwgrpo.errors import RunError
from hwgrpo.models import shared_prefix_masks
from hwgrpo.models.layers import layerwise_on_device
from hwgrpo.models.lm_head import HeadSpec, causal_lm
from hwgrpo.models.meta_device import non_parameter_tensors, set_non_parameter_tensors
from hwgrpo.models.windows import shortened
from hwgrpo.training.module_fusion import Fused, check_ranks_agree, fuse, fuse_as_on_rank_0
from hwgrpo.training.policy.auto_settings import AttentionSelection, windows_in_reach
from hwgrpo.training.policy.layout_check import compute_unsharded_states, select_supported_layout
from hwgrpo.training.policy.layouts import Layout
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.rank0_weights import Rank0Weights
from hwgrpo.training.policy.reference_model import Reference, build_reference
from hwgrpo.training.sequence_checks import self_test_sequence_parallel
from hwgrpo.training.shared_setup import load_checked, load_policy, make_replica, needs_replica, policy_of
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks


@dataclass(frozen=True)
class Models:
    """What was put together."""

    policy: PolicyModel
    """Wrapped by the strategy."""
    reference: Reference | None
    replica: Any
    """What the local engine samples with, where that is not the policy itself."""
    trainable: int
    """Parameters that are trained, over all ranks."""
    fused: Fused
    layout: Layout
    """The one chosen, or what the model honours instead."""
    obstacle: str | None
    """Why it is not the one chosen."""


def build_models(
    config: Config, device: Device, strategy: Strategy, tokenizer: Any, attention: AttentionSelection, layout: Layout
) -> Models:
    """Load the model, try what depends on it, and hand it to the strategy.

    Where the strategy cuts the policy over ranks, no device ever holds all of it in fp32, and rank 0 alone reads it.

    Args:
        config: the run's settings.
        device: this rank's.
        strategy: has wrapped nothing yet.
        tokenizer: of the model.
        attention: what the model is to be loaded with.
        layout: of micro-batches, as the settings have it.

    Raises:
        ConfigError: the model cannot be read, or is none that can be trained like this, or by ranks that share rows.
        RunError: ranks differ in what they have.
    """
    weights = None
    if strategy.shards:
        policy, tried, weights = _read_by_rank_0(config, device, strategy, tokenizer, attention, layout)
    else:
        policy = load_policy(config, device, tokenizer)
        tried = _try_out(config, device, policy, attention, layout)
        check_ranks_agree(tried.fused, strategy)
    reference = build_reference(policy, config, on_meta_device=weights is not None)
    trainable = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    replica = None
    if needs_replica(config, strategy.shards):
        replica = make_replica(config, policy, weights)
    strategy.wrap(policy, config, weights)
    if reference is not None and reference.policy is not policy:
        strategy.wrap_reference(reference.policy, weights)
    with shortened(policy.base, windows_in_reach(config, policy.base.config)):
        self_test_sequence_parallel(policy, tried.layout, strategy.sequence_group, tried.states, device.torch_device)
    return Models(policy, reference, replica, trainable, tried.fused, tried.layout, tried.obstacle)


@dataclass(frozen=True)
class _Tried:
    """What is known of a model once it has computed something."""

    head: HeadSpec
    fused: Fused
    layout: Layout
    obstacle: str | None
    states: torch.Tensor | None
    """Hidden states of a few tokens, where nobody has the layers whole later."""


def _try_out(
    config: Config, device: Device, policy: PolicyModel, attention: AttentionSelection, layout: Layout
) -> _Tried:
    fused = fuse(config, device.backend, policy, attention)
    layout, obstacle = select_supported_layout(config, policy, layout)
    with shortened(policy.base, windows_in_reach(config, policy.base.config)):
        states = compute_unsharded_states(policy) if config.trainer.tensor_parallel_size > 1 else None
    return _Tried(policy.head, fused, layout, obstacle, states)


def _read_by_rank_0(
    config: Config, device: Device, strategy: Strategy, tokenizer: Any, attention: AttentionSelection, layout: Layout
) -> tuple[PolicyModel, _Tried, Rank0Weights]:
    """Read the model into the host's memory on rank 0, try it there on its device, and make the others' like it."""
    main = strategy.rank == 0

    def read() -> tuple[Any, PolicyModel | None, _Tried | None]:
        model = load_checked(config, attention.loaded_as, tokenizer, on_meta_device=not main)
        if not main:
            return model, None, None
        with layerwise_on_device(causal_lm(model), device.torch_device):
            policy = policy_of(config, device, model)
            return model, policy, _try_out(config, device, policy, attention, layout)

    model, policy, tried = raise_on_all_ranks(strategy, read)
    mine = (tried, non_parameter_tensors(model), _structure(model)) if main else None
    tried, beside, structure = strategy.gather_objects(mine)[0]

    def compare() -> None:
        if _structure(model) != structure:
            raise RunError(
                f"rank {strategy.rank} makes another {type(causal_lm(model)).__name__} of model.path="
                f"{config.model.path!r} than rank 0: give every host the same files and the same transformers and peft"
            )

    raise_on_all_ranks(strategy, compare)
    set_non_parameter_tensors(model, beside, device.torch_device)
    weights = Rank0Weights(model, device.torch_device, strategy.rank)
    if policy is None:
        policy = policy_of(config, device, model, tried.head)
        fuse_as_on_rank_0(tried.fused, policy, device.torch_device)
        if tried.layout.attention == "branched":
            shared_prefix_masks.enable(policy.base)  # as the trial has left it on rank 0
    return policy, tried, weights


def _structure(model: torch.nn.Module) -> list[tuple[str, tuple[int, ...], bool]]:
    """Return names and shapes of a model's parameters, tied ones once, and whether they are trained."""
    return [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
