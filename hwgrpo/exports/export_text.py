"""Settings of another project as a script or a YAML file, with what is lost as comments."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from typing import Any

from hwgrpo.exports.peer_export import Exported, Lost
from hwgrpo.imports.hydra_values import parse_value
from hwgrpo.imports.recipe_text import compact
from hwgrpo.imports.variable_text import VariableText
from hwgrpo.peer_tables.peer_row import UNSET
from hwgrpo.peer_tables.verl_names import ROWS
from hwgrpo.text import one_line

_PLAIN = re.compile(r"[\w./:@+-]+")


def verl_script(exported: Exported, source: str) -> str:
    """Return a bash script that starts verl with the settings.

    Args:
        exported: settings of verl.
        source: name of the recipe.
    """
    arguments = [shlex.quote(f"{_added(key)}{key}={hydra_value(value)}") for key, value in exported.settings.items()]
    version = "# Keys of verl since mid-2026; earlier versions have no reward.* and refuse it."
    lines = ["#!/usr/bin/env bash", *_comments(exported, source), version, "set -euo pipefail"]
    lines.append("python3 -m verl.trainer.main_ppo \\")
    lines += [f"    {argument} \\" for argument in arguments]
    return "\n".join([*lines, '    "$@"']) + "\n"


def trl_yaml(exported: Exported, source: str) -> str:
    """Return a YAML file for `trl grpo --config FILE`.

    Args:
        exported: settings of TRL.
        source: name of the recipe.
    """
    import yaml

    text = yaml.safe_dump(_plain(exported.settings), sort_keys=False, allow_unicode=True)
    processes = "# For one process; for N, divide gradient_accumulation_steps by N."
    return "\n".join([*_comments(exported, source), processes]) + "\n" + text


def hydra_value(value: Any) -> str:
    """Return a value as an override of Hydra has it."""
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra_value(each)}" for key, each in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return str(value) if value is not None else "null"
    if isinstance(value, str) and not (_PLAIN.fullmatch(value) and parse_value(value, "") == value):
        escaped = value if isinstance(value, VariableText) else value.replace("${", "\\${")
        return '"' + escaped.replace('"', '\\"') + '"'
    return str(value)


def _plain(value: Any) -> Any:
    """Return a value that YAML knows: a text with variables is one."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    return str(value) if isinstance(value, str) else value


def _added(key: str) -> str:
    """Return the mark of a key that verl's configuration does not have before it is set."""
    return "" if key in ROWS and ".override_config." not in key else "++"


def _comments(exported: Exported, source: str) -> Iterator[str]:
    yield one_line(f"# {source} of hwgrpo as settings of {exported.project}.")
    yield from (f"# Lost: {lost_text(each, exported.project)}" for each in exported.lost)


def lost_text(lost: Lost, project: str) -> str:
    """Return what is lost, in a line."""
    has = f"{project}'s run has {_shown(lost.becomes)}" if lost.becomes is not UNSET else ""
    line = f"{lost.key}={_shown(lost.value)}: {'; '.join(filter(None, (has, lost.why)))}"
    return one_line(" ".join(line.split()))


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
        return compact([_without_defaults(each) for each in value])
    return compact(value)


def _without_defaults(section: Any) -> Any:
    """Return a section of a list as it would be written: its name alone where all else is default."""
    changed = {
        field.name: value
        for field in dataclasses.fields(section)
        if (value := getattr(section, field.name)) not in (field.default, None) and value != {}
    }
    return changed["name"] if set(changed) == {"name"} else changed
