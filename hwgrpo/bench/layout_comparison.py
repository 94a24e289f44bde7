"""Layouts that a model supports, and comparison of an update in each with padded rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from hwgrpo_backends.device import Device
from torch import nn

from hwgrpo.bench.step_result import LayoutBench, LayoutDifference
from hwgrpo.bench.work import Tokens, counted_tokens
from hwgrpo.catalog import LAYOUTS
from hwgrpo.config import Config
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.training.policy.auto_settings import attention_of, choose_layout, micro_batch_tokens
from hwgrpo.training.policy.layout_check import attend_by_lengths, select_supported_layout
from hwgrpo.training.policy.layouts import PADDED, Layout
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import TrainBatch

TOLERANCE = {torch.float32: LayoutDifference(loss=1e-5, gradient_norm=1e-5, gradient=1e-4)}
TOLERANCE_16_BIT = LayoutDifference(loss=1e-2, gradient_norm=2e-2, gradient=1e-1)


def tolerance(dtype: torch.dtype) -> LayoutDifference:
    """Return the largest differences that rounding explains in a compute dtype."""
    return TOLERANCE.get(dtype, TOLERANCE_16_BIT)


@dataclass(frozen=True)
class FirstUpdate:
    """What the first update of a batch computes."""

    loss: float
    gradient: Mapping[str, torch.Tensor]
    """By parameter, on the host, before clipping."""
    tokens: Tokens


def possible_layout(update: PolicyUpdate, device: Device, name: str) -> tuple[Layout | None, str]:
    """Return the layout of this name if the model can have it, else None and why not.

    Raises:
        ConfigError: there is no layout of that name.
    """
    LAYOUTS.check(name, "layout")
    config = replace(update.config, model=replace(update.config.model, layout=name))
    attention = attention_of(update.config, device).loaded_as
    try:
        layout, reason = select_supported_layout(
            config, update.policy, choose_layout(config, update.policy.base.config, attention)
        )
    except ConfigError as error:
        return None, str(error).split("; use model.layout=")[0]
    if layout.name != name:
        return None, reason or f"with attention {attention!r} it is {layout.name}"
    return attend_by_lengths(config, update.policy, layout, device.torch_device)[0], ""


def first_update(update: PolicyUpdate, batch: TrainBatch, layout: Layout) -> FirstUpdate:
    """Compute loss and gradient of a full batch in a layout, without an update.

    Dropout is off, since layouts draw different numbers for it, and so is a router loss, which is defined per
    micro-batch.
    """
    config = _without_router_loss(update.config)
    with _without_dropout(update.policy), counted_tokens(update.policy) as tokens:
        try:
            loss, _ = replace(update, layout=layout, config=config).accumulate_gradients(batch, range(len(batch)))
            gradient = {
                name: parameter.grad.detach().cpu().clone()
                for name, parameter in update.policy.named_parameters()
                if parameter.grad is not None
            }
        finally:
            update.strategy.discard_gradients()
    return FirstUpdate(loss, gradient, tokens)


def compare(padded: FirstUpdate, other: FirstUpdate) -> LayoutDifference:
    """Return how far `other` is from `padded`."""
    difference = squares = other_squares = 0.0
    for name in padded.gradient.keys() | other.gradient.keys():
        a, b = (side.gradient[name].double() if name in side.gradient else torch.zeros(()) for side in (padded, other))
        difference += float((a - b).square().sum())
        squares += float(a.square().sum())
        other_squares += float(b.square().sum())
    norm = max(squares**0.5, 1e-30)
    return LayoutDifference(
        loss=abs(padded.loss - other.loss) / max(1.0, abs(padded.loss)),
        gradient_norm=abs(other_squares**0.5 - squares**0.5) / norm,
        gradient=difference**0.5 / norm,
    )


def fault(difference: LayoutDifference, allowed: LayoutDifference, padded: FirstUpdate, other: FirstUpdate) -> str:
    """Describe how `other` differs by more than rounding; "" if it does not."""
    faults = []
    if other.tokens.trained != padded.tokens.trained:
        faults.append(f"it trains {other.tokens.trained:,} response tokens of {padded.tokens.trained:,}")
    for what in ("loss", "gradient_norm", "gradient"):
        value, limit = getattr(difference, what), getattr(allowed, what)
        if not value <= limit:
            name = what.replace("_", " ")
            faults.append(f"its {name} differs by {value:.1e} from padded rows' ({limit:.0e} allowed)")
    return "; ".join(faults)


def checked_layouts(
    update: PolicyUpdate, device: Device, batch: TrainBatch, names: Sequence[str]
) -> list[tuple[LayoutBench, Layout | None]]:
    """Try layouts on a batch.

    Returns:
        For each name what came of it, and the layout where it may be timed.

    Raises:
        ConfigError: there is no layout of a name.
        RunError: the batch does not fit in padded rows, with which the others are compared.
    """
    budget = f"trainer.tokens_per_micro_batch={micro_batch_tokens(update.config, update.device)}"
    padded = _unless_too_large(update, device, batch, PADDED)
    if padded is None:
        raise RunError(f"padded rows, with which layouts are compared, run out of memory here; lower {budget}")
    return [_checked(update, device, batch, name, padded, budget) for name in names]


def _checked(
    update: PolicyUpdate, device: Device, batch: TrainBatch, name: str, padded: FirstUpdate, budget: str
) -> tuple[LayoutBench, Layout | None]:
    layout, reason = possible_layout(update, device, name)
    if layout is None:
        return LayoutBench(name, "impossible", reason), None
    first_update = padded if layout is PADDED else _unless_too_large(update, device, batch, layout)
    if first_update is None:
        return LayoutBench(name, "impossible", f"it runs out of memory here; lower {budget}"), None
    difference = compare(padded, first_update)
    reason = fault(difference, tolerance(update.policy.compute_dtype), padded, first_update)
    return LayoutBench(name, "wrong" if reason else "timed", reason, difference), None if reason else layout


def _unless_too_large(update: PolicyUpdate, device: Device, batch: TrainBatch, layout: Layout) -> FirstUpdate | None:
    try:
        return first_update(update, batch, layout)
    except (RuntimeError, MemoryError) as error:
        if not device.is_oom(error):
            raise
    device.empty_cache()
    return None


def _without_router_loss(config: Config) -> Config:
    return replace(config, model=replace(config.model, router_loss_coef=0.0))


@contextmanager
def _without_dropout(policy: nn.Module) -> Iterator[None]:
    places = [
        (module, name)
        for module in policy.modules()
        for name in (("p",) if isinstance(module, nn.Dropout) else ("attention_dropout",))
        if isinstance(getattr(module, name, None), float)
    ]
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)
