"""The settings of a captured step, with those of the command line."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hwgrpo.config import Config, load_config
from hwgrpo.config.load import unset_variables
from hwgrpo.config.stored_settings import stored_tree
from hwgrpo.config.written_config import dotted, texts
from hwgrpo.errors import ConfigError
from hwgrpo.support.text import HIDDEN, MASK

UNREAD = (
    *("data", "observe", "rollout.engine", "rollout.source", "rollout.workflow"),
    *("trainer.strategy", "trainer.stages"),
)
"""Sections and settings that a replay does not use: a plug-in that they name may be absent."""


@dataclass(frozen=True)
class ReplaySettings:
    """The settings of a replay."""

    config: Config
    overridden: frozenset[str]
    """Keys of the command line."""
    missing: Mapping[str, str]
    """Key of each value that is not here -> why: a secret, or a variable that is not set."""

    def overrides(self, key: str) -> bool:
        """Return whether the command line sets a key, or one below it."""
        return any(each == key or each.startswith(f"{key}.") for each in self.overridden)


def captured_tree(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a captured step's step.json as plain containers."""
    return copy.deepcopy(stored_tree(facts["config"]))


def replay_settings(
    facts: Mapping[str, Any], overrides: Sequence[str], untrusted: Mapping[str, str] = MappingProxyType({})
) -> ReplaySettings:
    """Return the settings of a replay; data, and files of rewards, may be missing.

    Args:
        facts: content of the captured step's step.json.
        overrides: `key=value` of the command line.
        untrusted: captured settings that name code -> its name; rewards among them are missing.

    Raises:
        ConfigError: an override is wrong, or untrusted code is more than rewards.
    """
    tree = captured_tree(facts)
    overridden = frozenset(each.lstrip("+").partition("=")[0] for each in overrides)
    missing = {}
    for key, name in untrusted.items():
        if any(f"{key}.".startswith(f"{each}.") for each in (*overridden, *UNREAD)):
            continue
        if not key.startswith("reward.functions."):
            raise ConfigError(
                f"{key}={name!r}: the captured step names code, which is anything that who made it wrote; if you trust "
                "them, add --trust-code"
            )
        missing[key] = f"{name} is code of who made the captured step; if you trust them, add --trust-code"
    for place, text in [*texts(tree)]:
        if MASK in text and "${" not in text:
            missing[dotted(place)] = "a part of its value is a secret, which a captured step leaves out"
        if text == HIDDEN:
            missing[dotted(place)] = "its value is a secret, which a captured step leaves out"
            inner: Any = tree
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = None
    config = load_config(
        tree,
        overrides,
        data_may_be_missing=True,
        files_may_be_missing=True,
        variables_may_be_missing=True,
        unread=UNREAD,
    )
    config.data.template_date = config.data.template_date or facts["template_date"]
    unset = unset_variables(config)
    missing |= {key: f"the environment variable {name} is not set" for key, name in unset.items()}
    return ReplaySettings(config, overridden, {key: why for key, why in missing.items() if key not in overridden})
