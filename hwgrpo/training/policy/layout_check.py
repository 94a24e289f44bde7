"""Whether a model honours a layout: hidden states must be those of one sequence per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.models.meta_device import full_shape
from hwgrpo.models.windows import described, shortened
from hwgrpo.training.policy.auto_settings import windows_in_reach
from hwgrpo.training.policy.layouts import BRANCHED, GROUPED_MASKED, PADDED, Layout, Rows
from hwgrpo.training.policy.micro_batch import TokenSignals, lay_out
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.sequence_group import ALONE, SequenceGroup
from hwgrpo.training.policy.sequence_shard import share_out
from hwgrpo.values import TrainBatch

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest relative difference of hidden states that rounding explains."""

PADDING_TOLERANCE = TOLERANCE | {torch.bfloat16: 0.25}
"""The same where the alternative is to refuse the model: rounding may send a token to another expert."""


def proven_layout(config: Config, policy: PolicyModel, layout: Layout) -> tuple[Layout, str | None]:
    """Try a layout on a few tokens; architectures differ in whether they take a mask and positions as they are.

    Windows that a sequence of the run can outgrow are shortened meanwhile, so that these few tokens outgrow them.

    Args:
        config: the run's settings.
        policy: the model, on its device.
        layout: the one chosen.

    Returns:
        The layout to use, and why it is not the one chosen: grouped falls back to grouped_masked, where no layer has a
        sliding window, and only then, if it was chosen by auto, to padded.

    Raises:
        ConfigError: the layout was asked for by name, and the model does not honour it; or it does not even honour
            padding.
    """
    windows = windows_in_reach(config, policy.base.config)
    with shortened(policy.base, windows):
        gap = _gap(policy, PADDED)
        if gap <= PADDING_TOLERANCE[policy.compute_dtype]:
            return _honoured(config, policy, layout, bool(windows))
    beyond = ""
    if windows and _gap(policy, PADDED) <= PADDING_TOLERANCE[policy.compute_dtype]:
        beyond = (
            f" once it is longer than {described(windows)}: keep data.max_prompt_tokens + rollout.max_response_tokens "
            f"at {min(windows.values())} or less"
        )
    raise ConfigError(
        f"{type(policy.base).__name__}: hidden states of a sequence change by {gap:.2g} when padding stands behind "
        f"it{beyond or '; such a model is not supported'}"
    )


def _honoured(config: Config, policy: PolicyModel, layout: Layout, windowed: bool) -> tuple[Layout, str | None]:
    """Return the layout that a model honours, as `proven_layout` does; `windowed`: a sequence can outgrow a window."""
    attention = policy.base.config._attn_implementation
    reasons = []
    candidates = [layout]
    if layout.attention == "branched":
        mask_suffices = not windowed and obstacle_to(policy, GROUPED_MASKED) is None
        candidates = [layout if mask_suffices else BRANCHED, *([GROUPED_MASKED] if mask_suffices else [])]
    for one in candidates:
        obstacle = None if one is PADDED else obstacle_to(policy, replace(one, dense_up_to=0))
        if obstacle is None:
            return one, f"layout {one.name}: {'; '.join(reasons)}" if reasons else None
        policy.base.set_attn_implementation(attention)
        reasons.append(f"{type(policy.base).__name__} cannot have the {one.name} layout: {obstacle}")
    if config.model.layout != "auto":
        raise ConfigError(f"model.layout={layout.name!r}: {'; '.join(reasons)}; use model.layout=padded")
    return PADDED, f"layout padded: {'; '.join(reasons)}"


def obstacle_to(
    policy: PolicyModel,
    layout: Layout,
    group: SequenceGroup = ALONE,
    tolerance: Mapping[torch.dtype, float] = MappingProxyType(TOLERANCE),
    expected: torch.Tensor | None = None,
    device: torch.device | None = None,
) -> str | None:
    """Return why hidden states would not be those of a sequence by itself, or None.

    Args:
        policy: the model, on its device.
        layout: of rows.
        group: of ranks that share rows; all of them call this together.
        tolerance: by compute dtype.
        expected: what `states_alone` returned, where no rank can find it any more.
        device: where the model computes, where its weights may be kept elsewhere.
    """
    try:
        gap = _gap(policy, layout, group, expected, device)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:  # what a forward raises at a mask it cannot read
        what = "does not accept such a mask" if group.size == 1 else "fails where ranks share rows"
        return f"its forward {what} ({type(error).__name__}: {str(error).splitlines()[0]})"
    return None if gap <= tolerance[policy.compute_dtype] else f"its hidden states would differ by {gap:.2g}"


def states_alone(policy: PolicyModel) -> torch.Tensor:
    """Return [16, H] fp32 on the host: hidden states of a few tokens, computed a sequence at a time."""
    return _states(policy, _batch(policy), [(PADDED, [[s]], ALONE) for s in range(4)], None)


def _gap(
    policy: PolicyModel,
    layout: Layout,
    group: SequenceGroup = ALONE,
    expected: torch.Tensor | None = None,
    device: torch.device | None = None,
) -> float:
    """Return the relative difference of hidden states between the layout and each sequence by itself."""
    batch = _batch(policy)
    if expected is None:
        expected = _states(policy, batch, [(PADDED, [[s]], ALONE) for s in range(4)], device)
    rows = layout.rows(batch, range(4), 1000, policy.hidden_size)
    found = group.sum(_states(policy, batch, [(layout, rows, group)], device))
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def _batch(policy: PolicyModel) -> TrainBatch:
    ids = torch.arange(24) % full_shape(policy.base.get_input_embeddings().weight)[0]
    return TrainBatch(
        prompt_tokens=ids[:7],
        prompt_offsets=torch.tensor([0, 3, 7]),
        prompt_index=torch.tensor([0, 0, 1, 1]),
        tokens=ids[7:23],
        offsets=torch.tensor([0, 5, 8, 12, 16]),
        advantages=torch.ones(4),
        rollout_logprobs=torch.zeros(16),
    )


def _states(
    policy: PolicyModel,
    batch: TrainBatch,
    parts: Sequence[tuple[Layout, Rows, SequenceGroup]],
    device: torch.device | None,
) -> torch.Tensor:
    """Return [16, H]: the hidden states that predict the response tokens of rows; 0 where other ranks find them."""
    where: torch.device = device or policy.base.get_input_embeddings().weight.device
    by_token = torch.zeros(len(batch.tokens), policy.hidden_size)
    was_training = policy.training
    policy.eval()
    with torch.no_grad():
        for layout, rows, group in parts:
            micro = lay_out(batch, rows, TokenSignals({}, {}), layout, multiple=group.size)
            micro = share_out(micro, group, whole_sequences=False)
            by_token[micro.token_index] = policy.hidden_states(micro.to(where)).cpu().float()
    policy.train(was_training)
    return by_token
