"""Survey every implementation of every op for one kind of tensors: selected, usable or impossible, and why."""

from dataclasses import dataclass
from typing import Literal

import torch

from .op import BUILT_IN, Implementation, Key, shape_class
from .registry import NONE_OF_THAT_NAME, Choice, KernelRegistry, default_registry


@dataclass(frozen=True)
class Verdict:
    """One implementation: selected, usable or unable to run, with the reason."""

    name: str
    state: Literal["chosen", "usable", "impossible"]
    reason: str
    origin: str


@dataclass(frozen=True)
class OpSurvey:
    """One op: its implementations, the selected one first, or the error of selecting one."""

    op: str
    summary: str
    verdicts: tuple[Verdict, ...]
    error: str | None = None

    @property
    def chosen(self) -> str | None:
        """Name of the selected implementation; None if selecting one fails."""
        return next((each.name for each in self.verdicts if each.state == "chosen"), None)


def survey(
    device_type: str, dtype: torch.dtype, vocab: int, registry: KernelRegistry = default_registry
) -> tuple[OpSurvey, ...]:
    """Return for every op which implementations can run, and which one the registry selects.

    Args:
        device_type: torch device type ("cpu").
        dtype: of logits or hidden states.
        vocab: V.
        registry: whose ops.

    Raises:
        ValueError: a pin names an unknown op or implementation.
    """
    preference = tuple(registry.choices()["preference"])
    surveys = []
    for op in registry.ops():
        choice, error = None, None
        try:
            choice = registry.resolve(op.name, device_type, dtype, vocab)
        except ValueError as raised:  # shown together with the implementations' own reasons
            error = str(raised)
        key = Key(op.name, device_type, dtype, shape_class(vocab))
        implementations = registry.implementations(op.name)
        chosen = None if choice is None else _selection_reason(choice, preference, only=len(implementations) == 1)
        verdicts = [_verdict(each, key, choice, chosen, preference) for each in implementations]
        absent = [name for name, reason in choice.skipped if reason == NONE_OF_THAT_NAME] if choice else []
        verdicts += [Verdict(name, "impossible", NONE_OF_THAT_NAME, BUILT_IN) for name in absent]
        verdicts.sort(key=lambda verdict: ("chosen", "usable", "impossible").index(verdict.state))
        surveys.append(OpSurvey(op.name, op.summary, tuple(verdicts), error))
    return tuple(surveys)


def _verdict(
    each: Implementation, key: Key, choice: Choice | None, selection_reason: str | None, preference: tuple[str, ...]
) -> Verdict:
    if choice is not None and selection_reason is not None and each.name == choice.name:
        return Verdict(each.name, "chosen", selection_reason, each.origin)
    reason = each.reason_against(key) or (dict(choice.skipped).get(each.name) if choice else None)
    if reason is not None:
        return Verdict(each.name, "impossible", reason, each.origin)
    if each.origin != BUILT_IN and each.name not in preference:
        return Verdict(each.name, "usable", f"from a plug-in, used only when pinned: {key.op}={each.name}", each.origin)
    if choice is None:
        return Verdict(each.name, "usable", "could run", each.origin)
    over = "is pinned" if choice.pinned_by else "comes first"
    return Verdict(each.name, "usable", f"could run, but {choice.name} {over}", each.origin)


def _selection_reason(choice: Choice, preference: tuple[str, ...], only: bool) -> str:
    if choice.pinned_by:
        return f"pinned by {choice.pinned_by}"
    if only:
        return "the only one"
    if choice.name in preference:
        return "the first of the preferred that can run"
    return "the first that can run"
