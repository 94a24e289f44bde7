"""The settings of a captured step, with those of the command line."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hwgrpo.config import Config, load_config
from hwgrpo.config.load import unset_variables
from hwgrpo.config.stored_settings import stored_tree
from hwgrpo.config.written_config import dotted, texts
from hwgrpo.support.text import HIDDEN

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


def replay_settings(facts: Mapping[str, Any], overrides: Sequence[str]) -> ReplaySettings:
    """Return the settings of a replay; data, and files of rewards, may be missing.

    Args:
        facts: content of the captured step's step.json.
        overrides: `key=value` of the command line.

    Raises:
        ConfigError: an override is wrong.
    """
    tree = captured_tree(facts)
    missing = {}
    for place, text in [*texts(tree)]:
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
    overridden = frozenset(each.lstrip("+").partition("=")[0] for each in overrides)
    return ReplaySettings(config, overridden, {key: why for key, why in missing.items() if key not in overridden})
