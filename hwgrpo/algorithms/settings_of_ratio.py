"""Settings of the policy loss without effect in a run in which every ratio is 1."""

from __future__ import annotations

import inspect
from typing import Any

from hwgrpo.algorithms.scope import Scoped
from hwgrpo.catalog import POLICY_LOSSES
from hwgrpo.config.bound_arguments import own_arguments
from hwgrpo.config.schema import LossConfig


def of_ratio(name: str) -> tuple[str, ...]:
    """Return the settings and arguments of a built-in loss that change no bit of the gradient where every ratio is 1.

    They are all that it reads but those of `Scoped.on_policy`. Nothing is known of a loss of the user's own.
    """
    if name not in POLICY_LOSSES.built_in:
        return ()
    surrogate: Scoped[..., Any] = POLICY_LOSSES.load(name)
    settings = (setting for setting in POLICY_LOSSES.built_in[name].reads if setting != "kwargs")
    return tuple(each for each in (*settings, *own_arguments(surrogate.function)) if each not in surrogate.on_policy)


def settings_of_ratio(loss: LossConfig) -> list[str]:
    """Return `key=value` of the settings that change no bit of the gradient where every ratio is 1.

    They are those with another value than the default, and the loss's own arguments with any. One that is off (null)
    is left out; so is a negative `clip_high`, which caps a ratio of 1, too.
    """
    usual, found = vars(LossConfig()), []
    for name in of_ratio(loss.name):
        if name not in usual:
            default = own_arguments(POLICY_LOSSES.load(loss.name).function)[name]
            found.append(f"algorithm.loss.kwargs.{name}={loss.kwargs.get(name, default):g}")
            continue
        value = getattr(loss, name)
        if value not in (None, usual[name]) and not (name == "clip_high" and value < 0):
            found.append(f"algorithm.loss.{name}={value:g}")
    return found


def ratio_note(loss: LossConfig) -> str | None:
    """Return a line about the loss of a run in which every ratio is 1; None if all of its settings have an effect."""
    unused = settings_of_ratio(loss)
    if not unused:
        return None
    surrogate: Scoped[..., Any] = POLICY_LOSSES.load(loss.name)
    selected_by = inspect.signature(surrogate.selects).parameters if surrogate.selects is not None else {}
    in_vain = "share" in selected_by and "share" in of_ratio(loss.name)
    return (
        f"one update per step: every ratio is 1, so that {', '.join(unused)} "
        f"{'have' if len(unused) > 1 else 'has'} no effect"
        f"{', and the scoring pass that selects tokens changes nothing (algorithm.loss.name=gpg)' if in_vain else ''}; "
        "several updates per step have other ratios (trainer.prompts_per_update, trainer.epochs_per_batch)"
    )
