"""Startup check that a model supports a layout: hidden states must equal those of one sequence per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from hwgrpo_backends.device import has_flash_operator

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.models import shared_prefix_masks, varlen_attention
from hwgrpo.models.meta_device import full_shape
from hwgrpo.models.placeholders import placeholder_ids
from hwgrpo.models.rounding import Excess, check_ids, find_excess, measure_rounding
from hwgrpo.models.shared_prefix_masks import replace_attention
from hwgrpo.models.vision import own_logits
from hwgrpo.models.windows import SHORT, describe_windows, shorten_windows
from hwgrpo.ragged import offsets_of
from hwgrpo.training.policy.auto_settings import choose_layout, head_size, reason_against_lengths, windows_in_reach
from hwgrpo.training.policy.layouts import BRANCHED, GROUPED_MASKED, PACKED_BY_LENGTHS, PADDED, Layout, Rows
from hwgrpo.training.policy.micro_batch import build_micro_batch
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.sequence_shard import SINGLE_RANK, SequenceGroup, shard_micro_batch
from hwgrpo.values import Prompt, TrainBatch, image_columns

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Relative difference of hidden states that counts as rounding in any model; in some, rounding has larger effects."""

PADDING_TOLERANCE = TOLERANCE | {torch.bfloat16: 0.25}
"""The tolerance where the alternative is to reject the model: rounding may route a token to another expert."""


@dataclass(frozen=True)
class ExpectedStates:
    """Hidden states of a few tokens, computed one sequence at a time, on the host."""

    states: torch.Tensor
    """[16, H] fp32."""
    rounding: torch.Tensor
    """Effect of rounding on each token, [16]."""


def select_supported_layout(config: Config, policy: PolicyModel, layout: Layout) -> tuple[Layout, str | None]:
    """Test a layout on a few tokens; architectures differ in their use of masks and positions.

    Windows shorter than the longest sequence are shortened for the test, so that its few tokens exceed them too.

    Args:
        config: the run's settings.
        policy: the model, on its device.
        layout: the layout from the settings.

    Returns:
        The layout to use, and the reason for a fallback: grouped falls back to grouped_masked if no layer has a sliding
        window, and with `auto` then to padded.

    Raises:
        ConfigError: the model does not support a layout set by name; or it does not even support padding.
    """
    check_images(policy)
    windows = windows_in_reach(config.data, config.rollout, policy.base.config)
    with shorten_windows(policy.base, windows):
        expected = compute_unsharded_states(policy)
        excess = _excess(policy, PADDED, expected, PADDING_TOLERANCE)
        if excess is None:
            can_pad = config.model.layout == "auto"
            return _fall_back(policy, layout, expected, exceeds_windows=bool(windows), can_pad=can_pad)
    beyond = ""
    if windows and _excess(policy, PADDED, compute_unsharded_states(policy), PADDING_TOLERANCE) is None:
        beyond = (
            f" once it is longer than {describe_windows(windows)}: keep data.max_prompt_tokens + "
            f"rollout.max_response_tokens at {min(windows.values())} or less"
        )
    raise ConfigError(
        f"{type(policy.base).__name__}: hidden states of a sequence change by {excess} when padding follows "
        f"it{beyond or '; such a model is not supported'}"
    )


def _fall_back(
    policy: PolicyModel, layout: Layout, expected: ExpectedStates, *, exceeds_windows: bool, can_pad: bool
) -> tuple[Layout, str | None]:
    """Return the first supported layout, and the reason for a fallback.

    Args:
        policy: the model, on its device.
        layout: the layout from the settings.
        expected: the hidden states that it has to give.
        exceeds_windows: whether a sequence can exceed a sliding window.
        can_pad: whether the fallback may be padded.

    Raises:
        ConfigError: only padded is supported, and not `can_pad`.
    """
    attention = policy.base.config._attn_implementation
    reasons = []
    candidates = [layout]
    if layout.attention == "branched" and layout.shares_prompt:
        mask_suffices = not exceeds_windows and reason_against_layout(policy, GROUPED_MASKED, expected) is None
        candidates = [layout if mask_suffices else BRANCHED, *([GROUPED_MASKED] if mask_suffices else [])]
    for candidate in candidates:
        tested = replace(candidate, dense_up_to=0)
        reason = None if candidate is PADDED else reason_against_layout(policy, tested, expected)
        if reason is None:
            return candidate, f"layout {candidate.name}: {'; '.join(reasons)}" if reasons else None
        policy.base.set_attn_implementation(attention)
        reasons.append(f"{type(policy.base).__name__} does not support the {candidate.name} layout: {reason}")
    if not can_pad:
        raise ConfigError(f"model.layout={layout.name!r}: {'; '.join(reasons)}; use model.layout=padded")
    return PADDED, f"layout padded: {'; '.join(reasons)}"


def check_images(policy: PolicyModel) -> None:
    """Compare logits after a prompt with an image to those that the model computes of pixels itself.

    Raises:
        ConfigError: they differ by more than rounding.
    """
    sample = None if policy.images is None else policy.images.sample
    if sample is None:
        return
    images = sample.images
    assert images is not None
    embeddings: Any = policy.base.get_input_embeddings()
    response = check_ids(full_shape(embeddings.weight)[0], 4, placeholder_ids(policy.base.config))
    batch = TrainBatch(
        prompt_tokens=torch.tensor(sample.token_ids),
        prompt_offsets=torch.tensor([0, len(sample.token_ids)]),
        prompt_index=torch.tensor([0]),
        tokens=response,
        offsets=torch.tensor([0, len(response)]),
        advantages=torch.ones(1),
        logprobs=torch.zeros(len(response)),
        **image_columns([sample]),
    )
    policy.eval()
    micro = build_micro_batch(batch, [[0]], {}, PADDED).to(embeddings.weight.device)

    @torch.no_grad()
    def ours() -> torch.Tensor:
        with policy.autocast(embeddings.weight.device):
            return replace(policy.head, banned=()).logits(
                policy.hidden_states(micro), policy.base.get_output_embeddings()
            )

    def own() -> torch.Tensor:
        with policy.autocast(embeddings.weight.device):
            logits = own_logits(policy.model, [*sample.token_ids, *response.tolist()], images)
            return logits[-1 - len(response) : -1].float()

    expected = own()
    floor = TOLERANCE[policy.compute_dtype]
    excess = find_excess(
        ours(), expected, floor, lambda: measure_rounding(embeddings, policy.compute_dtype, own, expected)
    )
    policy.train()
    if excess is not None:
        raise ConfigError(
            f"{type(policy.base).__name__}: logits after a prompt with an image differ by {excess} from those that the "
            "model computes of the pixels itself; such a model is not supported"
        )


def attend_by_lengths(
    config: Config, policy: PolicyModel, layout: Layout, device: torch.device
) -> tuple[Layout, str | None]:
    """Compute grouped and packed rows with torch's flash kernels, where a device has them and a test finds them right.

    Padded rows need no mask: they keep the causal kernel of the model's own attention.

    Args:
        config: the run's settings.
        policy: the model.
        layout: from `select_supported_layout`.
        device: device that computes.

    Returns:
        The layout to use, and a note for the user; None where there is nothing to choose. Packed rows by lengths fill a
        micro-batch. Where `auto` chose packed for the kernels, and they are wrong, it chooses again without them.
    """
    own = policy.base.config._attn_implementation
    over_sdpa = own in ("sdpa", shared_prefix_masks.NAME, shared_prefix_masks.BY_LENGTHS)
    if layout.name not in ("grouped", "packed") or not over_sdpa or not has_flash_operator(device.type):
        return layout, None
    windows = windows_in_reach(config.data, config.rollout, policy.base.config)
    by_lengths = layout if layout.shares_prompt else PACKED_BY_LENGTHS
    reason = _reason_against_lengths(config, policy, by_lengths, device, windowed=bool(windows))
    if reason is None:
        with shorten_windows(policy.base, windows):
            expected = compute_unsharded_states(policy)
            shared_prefix_masks.use_lengths(policy.base)
            reason = reason_against_layout(policy, replace(by_lengths, dense_up_to=0), expected)
        if reason is None:
            but = "; layers with a sliding window in reach keep their masks" if windows and layout.shares_prompt else ""
            return by_lengths, f"{layout.name} rows: flash attention by lengths, without masks and padding{but}"
        replace_attention(policy.base, own)
    note = f"{layout.name} rows: attention by masks, not by lengths: {reason}"
    if layout.name == "packed" and config.model.layout == "auto":
        layout, _ = select_supported_layout(config, policy, choose_layout(config, policy.base.config, "sdpa"))
        note = f"layout {layout.name}, not packed rows by lengths: {reason}"
    return layout, note


def _reason_against_lengths(
    config: Config, policy: PolicyModel, layout: Layout, device: torch.device, *, windowed: bool
) -> str | None:
    settings, dtype = policy.base.config, policy.compute_dtype
    reason = reason_against_lengths(config, settings, dtype)
    reason = reason or varlen_attention.self_test(device, dtype, head_size(settings))
    if reason is None and windowed and not layout.shares_prompt:
        reason = varlen_attention.self_test(device, dtype, head_size(settings), window=SHORT)
        return None if reason is None else f"with a sliding window {reason}"
    return reason


def reason_against_layout(
    policy: PolicyModel,
    layout: Layout,
    expected: ExpectedStates,
    group: SequenceGroup = SINGLE_RANK,
    tolerance: Mapping[torch.dtype, float] = MappingProxyType(TOLERANCE),
    device: torch.device | None = None,
) -> str | None:
    """Return why hidden states differ from those of one sequence per row; None if they do not.

    Args:
        policy: the model, on its device.
        layout: layout of the rows.
        expected: from `compute_unsharded_states`.
        group: ranks that share rows; all of them call this together.
        tolerance: relative difference that counts as rounding in any model, by compute dtype.
        device: device that computes, where weights may be offloaded.
    """
    try:
        excess = _excess(policy, layout, expected, tolerance, group, device)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:  # what a forward raises at a mask it cannot read
        failure = "does not accept such a mask" if group.size == 1 else "fails where ranks share rows"
        return f"its forward {failure} ({type(error).__name__}: {str(error).splitlines()[0]})"
    return f"its hidden states would differ by {excess}" if excess else None


def compute_unsharded_states(policy: PolicyModel, device: torch.device | None = None) -> ExpectedStates:
    """Compute hidden states of a few tokens one sequence at a time, and how much rounding changes them.

    Where weights are sharded, all ranks call this together: every forward gathers them.

    Args:
        policy: the model, on its device.
        device: device that computes, where weights may be offloaded.
    """
    batch = _batch(policy)
    rows = PADDED.rows(batch, range(4), 1000, policy.hidden_size)
    embeddings: Any = policy.base.get_input_embeddings()

    def together() -> torch.Tensor:
        return _states(policy, batch, [(PADDED, rows, SINGLE_RANK)], device)

    states = _states(policy, batch, [(PADDED, [[s]], SINGLE_RANK) for s in range(4)], device)
    rounding = measure_rounding(embeddings, policy.compute_dtype, together, together())
    return ExpectedStates(states, rounding)


def _excess(
    policy: PolicyModel,
    layout: Layout,
    expected: ExpectedStates,
    tolerance: Mapping[torch.dtype, float],
    group: SequenceGroup = SINGLE_RANK,
    device: torch.device | None = None,
) -> Excess | None:
    """Return how hidden states in a layout differ from those of one sequence per row by more than rounding."""
    batch = _batch(policy)
    rows = layout.rows(batch, range(4), 1000, policy.hidden_size)
    states = group.sum(_states(policy, batch, [(layout, rows, group)], device))
    return find_excess(states, expected.states, tolerance[policy.compute_dtype], lambda: expected.rounding)


def _batch(policy: PolicyModel) -> TrainBatch:
    without = placeholder_ids(policy.base.config)
    ids = check_ids(full_shape(policy.base.get_input_embeddings().weight)[0], 23, without)
    ids[12] = ids[7]  # the first two responses begin alike
    prompts = [Prompt("", "", tuple(ids[first:end].tolist()), None, {}) for first, end in ((0, 3), (3, 7))]
    if policy.images is not None and policy.images.sample is not None:
        prompts[0] = policy.images.sample
    return TrainBatch(
        prompt_tokens=torch.tensor([token for prompt in prompts for token in prompt.token_ids]),
        prompt_offsets=offsets_of(torch.tensor([len(prompt.token_ids) for prompt in prompts])),
        **image_columns(prompts),
        prompt_index=torch.tensor([0, 0, 1, 1]),
        tokens=ids[7:23],
        offsets=torch.tensor([0, 5, 8, 12, 16]),
        advantages=torch.ones(4),
        logprobs=torch.zeros(16),
    )


def _states(
    policy: PolicyModel,
    batch: TrainBatch,
    parts: Sequence[tuple[Layout, Rows, SequenceGroup]],
    device: torch.device | None,
) -> torch.Tensor:
    """Return [16, H]: the hidden states that predict the rows' response tokens; 0 where other ranks compute them."""
    target: torch.device = device or policy.base.get_input_embeddings().weight.device
    by_token = torch.zeros(len(batch.tokens), policy.hidden_size)
    was_training = policy.training
    policy.eval()
    with torch.no_grad():
        for layout, rows, group in parts:
            micro = build_micro_batch(batch, rows, {}, layout, multiple=group.size)
            micro = shard_micro_batch(micro, group, full_sequences=False)
            by_token[micro.token_index] = policy.hidden_states(micro.to(target)).cpu().float()
    policy.train(was_training)
    return by_token
