"""Makes a run's models: the policy, its reference, and the sampler's copy."""

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
from hwgrpo.models.windows import shorten_windows
from hwgrpo.training.module_fusion import Fused, check_ranks_agree, fuse, fuse_as_on_rank_0
from hwgrpo.training.policy.auto_settings import AttentionSelection, choose_dtype, windows_in_reach
from hwgrpo.training.policy.layout_check import (
    ExpectedStates,
    attend_by_lengths,
    compute_unsharded_states,
    select_supported_layout,
)
from hwgrpo.training.policy.layouts import Layout
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.rank0_weights import Rank0Weights
from hwgrpo.training.policy.reference_model import Reference, build_reference
from hwgrpo.training.sequence_checks import verify_sequence_parallel
from hwgrpo.training.shared_setup import load_checked, load_policy, make_replica, needs_replica, policy_of
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks


@dataclass(frozen=True)
class Models:
    """The models of a run, and their startup checks' results."""

    policy: PolicyModel
    """The policy, wrapped by the strategy."""
    reference: Reference | None
    replica: Any
    """The sampler's copy for the local engine; None if it samples with the policy itself."""
    trainable: int
    """Number of trained parameters, over all ranks."""
    frozen_dtype: torch.dtype | None
    """Dtype of the frozen base model's matrices; None where all parameters are trained."""
    fused: Fused
    layout: Layout
    """The layout from the settings, or a supported fallback."""
    layout_reason: str | None
    """Reason for a fallback."""
    attention_note: str | None
    """How the rows of the layout attend, where there is a choice."""


def build_models(
    config: Config,
    device: Device,
    strategy: Strategy,
    tokenizer: Any,
    attention: AttentionSelection,
    layout: Layout,
    *,
    samples: bool = True,
) -> Models:
    """Load the model, run its startup checks, and wrap it by the strategy.

    If the strategy shards the policy, no device ever holds all of it in fp32, and only rank 0 reads it.

    Args:
        config: the run's settings.
        device: this rank's device.
        strategy: prepared, without a policy.
        tokenizer: the model's tokenizer.
        attention: the selected attention implementation.
        layout: layout of micro-batches from the settings.
        samples: whether a rollout engine samples with the model.

    Raises:
        ConfigError: the model cannot be read, or does not support these settings.
        RunError: the ranks have different models or fused modules.
    """
    weights = None
    if strategy.shards:
        policy, checked, weights = _load_on_rank_0(config, device, strategy, tokenizer, attention, layout)
        weights.replicate(policy.model)  # before the sampler's copy, which shares them
    else:
        policy = load_policy(config, device, tokenizer)
        checked = _check_model(config, device, policy, attention, layout)
        check_ranks_agree(checked.fused, strategy)
    reference = build_reference(policy, config.algorithm.kl, config.model.lora, on_meta_device=weights is not None)
    trainable = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    dtypes = {p.dtype for p in policy.parameters() if not p.requires_grad}
    frozen = next((dtype for dtype in (policy.compute_dtype, torch.float32) if dtype in dtypes), None)
    replica = None
    if samples and needs_replica(config, strategy.shards):
        replica = make_replica(config, policy, weights)
    strategy.wrap(policy, config, weights)
    if reference is not None and reference.policy is not policy:
        strategy.wrap_reference(reference.policy, weights)
    with shorten_windows(policy.base, windows_in_reach(config.data, config.rollout, policy.base.config)):
        verify_sequence_parallel(policy, checked.layout, strategy.sequence_group, checked.expected, device.torch_device)
    return Models(
        policy=policy,
        reference=reference,
        replica=replica,
        trainable=trainable,
        frozen_dtype=frozen,
        fused=checked.fused,
        layout=checked.layout,
        layout_reason=checked.layout_reason,
        attention_note=checked.attention_note,
    )


@dataclass(frozen=True)
class _Checked:
    """Results of a model's startup checks."""

    head: HeadSpec
    fused: Fused
    layout: Layout
    layout_reason: str | None
    attention_note: str | None
    by_lengths: bool
    """Rows are computed by `shared_prefix_masks.use_lengths`."""
    expected: ExpectedStates | None
    """For tensor parallelism: no rank has unsharded layers later."""


def _check_model(
    config: Config, device: Device, policy: PolicyModel, attention: AttentionSelection, layout: Layout
) -> _Checked:
    fused = fuse(config, device.backend, policy, attention)
    layout, layout_reason = select_supported_layout(config, policy, layout)
    layout, note = attend_by_lengths(config, policy, layout, device.torch_device)
    by_lengths = policy.base.config._attn_implementation == shared_prefix_masks.BY_LENGTHS
    with shorten_windows(policy.base, windows_in_reach(config.data, config.rollout, policy.base.config)):
        expected = compute_unsharded_states(policy) if config.trainer.tensor_parallel_size > 1 else None
    return _Checked(policy.head, fused, layout, layout_reason, note, by_lengths, expected)


def _load_on_rank_0(
    config: Config, device: Device, strategy: Strategy, tokenizer: Any, attention: AttentionSelection, layout: Layout
) -> tuple[PolicyModel, _Checked, Rank0Weights]:
    """Load the model into rank 0's host memory, check it on its device, and make the same model on the others."""
    main = strategy.rank == 0

    def load() -> tuple[Any, PolicyModel | None, _Checked | None]:
        # the others follow rank 0's dtypes, which depend on the values
        dtype = choose_dtype(config.model.dtype, device) if main else torch.float32
        model = load_checked(config, attention.loaded_as, tokenizer, compute_dtype=dtype, on_meta_device=not main)
        if not main:
            return model, None, None
        with layerwise_on_device(causal_lm(model), device.torch_device):
            policy = policy_of(config, device, model, tokenizer)
            return model, policy, _check_model(config, device, policy, attention, layout)

    model, policy, checked = raise_on_all_ranks(strategy, load)
    dtypes = [parameter.dtype for parameter in model.parameters()]
    mine = (checked, non_parameter_tensors(model), _structure(model), dtypes) if main else None
    checked, tensors, structure, dtypes = strategy.gather_objects(mine)[0]

    def compare() -> None:
        if _structure(model) != structure:
            raise RunError(
                f"rank {strategy.rank} makes another {type(causal_lm(model)).__name__} of model.path="
                f"{config.model.path!r} than rank 0: give every host the same files and the same transformers and peft"
            )

    raise_on_all_ranks(strategy, compare)
    for parameter, dtype in zip(model.parameters(), dtypes, strict=True):
        parameter.data = parameter.data.to(dtype)
    set_non_parameter_tensors(model, tensors, device.torch_device)
    weights = Rank0Weights(model, device.torch_device, strategy.rank)
    if policy is None:
        policy = policy_of(config, device, model, tokenizer, checked.head)
        fuse_as_on_rank_0(checked.fused, policy, device.torch_device)
        if checked.layout.attention == "branched":
            shared_prefix_masks.enable(policy.base)  # as the check did on rank 0
            if checked.by_lengths:
                shared_prefix_masks.use_lengths(policy.base)
    return policy, checked, weights


def _structure(model: torch.nn.Module) -> list[tuple[str, tuple[int, ...], bool]]:
    """Return names and shapes of a model's parameters, tied ones once, and whether they are trained."""
    return [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
