"""The settings of a captured step, with those of the command line."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hwgrpo.config import Config, load_config
from hwgrpo.config.load import unset_variables
from hwgrpo.config.stored_settings import stored_tree
from hwgrpo.config.written_config import dotted, texts
from hwgrpo.errors import CheckpointError, ConfigError
from hwgrpo.support.text import HIDDEN, MASK

UNREAD = (
    *("data", "observe", "rollout.engine", "rollout.source", "rollout.workflow"),
    *("rollout.agent.environments", "rollout.agent.tools", "trainer.strategy", "trainer.stages"),
)
"""Sections and settings that a replay does not use: a plug-in that they name may be absent."""
PROGRAMS = "code"
"""The reward that runs responses as programs."""
OPENING = {"sandbox_level", "site_packages"}
"""Its arguments that may take protection away."""


_LESS_PROTECTED = (
    "lets programs of the captured step do more than by default; if you trust who made it, add --trust-code"
)


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
    """Return the settings in a captured step's step.json as plain containers.

    Raises:
        CheckpointError: it has none that a run wrote.
    """
    try:
        tree = copy.deepcopy(stored_tree(facts["config"]))
    except (KeyError, TypeError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise CheckpointError(f"step.json has no settings that can be read: {error}; copy the folder again") from error
    if not isinstance(tree, dict):
        raise CheckpointError("step.json has no settings: its config is no mapping; copy the folder again")
    return tree


def replay_settings(
    facts: Mapping[str, Any], overrides: Sequence[str], untrusted: Mapping[str, str] | None = None
) -> ReplaySettings:
    """Return the settings of a replay; data, and files of rewards, may be missing.

    Args:
        facts: content of the captured step's step.json.
        overrides: `key=value` of the command line.
        untrusted: captured settings that name code -> its name; rewards among them are missing, as are those that
            would run captured programs with less protection than by default. None: who captured the step is trusted.

    Raises:
        ConfigError: an override is wrong, or untrusted code is more than rewards.
    """
    tree = captured_tree(facts)
    overridden = frozenset(each.lstrip("+").partition("=")[0] for each in overrides)
    missing = {}
    for key, name in (untrusted or {}).items():
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
    if untrusted is not None:
        missing |= _less_protected(config, overridden)
    unset = unset_variables(config)
    missing |= {key: f"the environment variable {name} is not set" for key, name in unset.items()}
    return ReplaySettings(config, overridden, {key: why for key, why in missing.items() if key not in overridden})


def _less_protected(config: Config, overridden: Collection[str]) -> dict[str, str]:
    """Return the rewards that protect less from captured programs than by default -> why that is not done here."""
    found = {}
    for i, function in enumerate(config.reward.functions):
        if function.name != PROGRAMS:
            continue
        if config.reward.sandbox.level == "none" and "reward.sandbox.level" not in overridden:
            found[f"reward.functions.{i}.name"] = f"reward.sandbox.level=none {_LESS_PROTECTED}"
        for argument in OPENING & function.kwargs.keys():
            found[f"reward.functions.{i}.kwargs.{argument}"] = f"it {_LESS_PROTECTED}"
    return found
