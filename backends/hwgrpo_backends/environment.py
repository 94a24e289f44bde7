"""Environment profiles of a backend, one for training and one for rollout. The user's values are kept.

Call `apply` before the first `import torch`: allocators and drivers read their variables once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from hwgrpo_backends.backend import Backend, Purpose
from hwgrpo_backends.facts import SELECTED_VARIABLE

APPLIED_VARIABLE = "HWGRPO_ENV_APPLIED"
"""JSON object of the variables that `apply` set, so that a child's profile can distinguish them from the user's."""


class Setting(NamedTuple):
    """One variable of a profile against an environment."""

    name: str
    value: str
    """The effective value: the user's if kept."""
    why: str
    kept: bool
    """True when the user had set it."""


def profile(
    backend: Backend, purpose: Purpose, environ: Mapping[str, str] = os.environ, deterministic: bool = False
) -> list[Setting]:
    """Return the settings that `apply` would make for `purpose`, including the user's values that it keeps."""
    ours = _applied(environ)
    settings = []
    for name, variable in backend.environment(purpose, deterministic).items():
        kept = name in environ and name not in ours
        settings.append(Setting(name, environ[name] if kept else variable.value, variable.why, kept))
    return settings


def apply(
    backend: Backend, purpose: Purpose, environ: MutableMapping[str, str] = os.environ, deterministic: bool = False
) -> list[Setting]:
    """Set a profile's variables, and the selected backend for child processes, which inherit it.

    Variables of a previous profile that are not in this one are removed.

    Args:
        backend: whose profile.
        purpose: "train" or "rollout".
        environ: changed in place.
        deterministic: add the variables of deterministic training.

    Returns:
        the settings, as `profile` lists them.
    """
    settings = profile(backend, purpose, environ, deterministic)
    for name in _applied(environ) - {setting.name for setting in settings}:
        environ.pop(name, None)
    ours = [setting for setting in settings if not setting.kept]
    for setting in ours:
        environ[setting.name] = setting.value
    environ[APPLIED_VARIABLE] = json.dumps({setting.name: setting.value for setting in ours})
    environ[SELECTED_VARIABLE] = backend.name
    return settings


def _applied(environ: Mapping[str, str]) -> set[str]:
    """Return the names of variables that have the value which `apply` gave them."""
    try:
        applied = json.loads(environ.get(APPLIED_VARIABLE) or "{}")
    except ValueError:  # not ours: then every value is the user's
        return set()
    if not isinstance(applied, dict):
        return set()
    return {name for name, value in applied.items() if environ.get(name) == value}
