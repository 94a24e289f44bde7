"""An import as a recipe: YAML that states what differs from the defaults, each setting below its origin."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hwgrpo.errors import shown
from hwgrpo.migrate.imports.import_result import Imported
from hwgrpo.migrate.imports.variable_text import VariableText
from hwgrpo.support.text import one_line

_PLAIN = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)
_LONGEST = 1000
"""Characters of a text in a table or comment."""
_UNPRINTABLE = re.compile(r"[^ -~]")
_NOT_TEXT = re.compile(r"(?i)yes|no|true|false|on|off|null")


def recipe_text(imported: Imported, source: str) -> str:
    """Return the recipe.

    Args:
        imported: the import.
        source: its name, for the first line.
    """
    lines = [f"# Imported from {source}. What is not stated here has hwgrpo's default."]
    if imported.launch is not None and imported.launch.processes is not None:
        lines.append(f"# On the same number of devices: {imported.launch.command()}")
    lines += [f"# Left out, refused: {each.key}={compact(each.value)}: {each.note}" for each in imported.refused()]
    lines += _lines(nested(imported.settings), imported.origins, ())
    return "\n".join(one_line(" ".join(line.splitlines())) for line in lines) + "\n"


def _lines(tree: Mapping[str, Any], origins: Mapping[str, str], path: tuple[str, ...]) -> Iterator[str]:
    indent = "  " * len(path)
    for name, value in tree.items():
        key = ".".join([*path, name])
        if key in origins:
            yield f"{indent}# {origins[key]}"
            yield f"{indent}{name}: {yaml_value(value)}"
        else:
            yield f"{indent}{name}:"
            yield from _lines(value, origins, (*path, name))


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted settings as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, last = key.split(".")
        here = tree
        for parent in parents:
            here = here.setdefault(parent, {})
        here[last] = value
    return tree


def yaml_value(value: Any) -> str:
    """Return a value as YAML in one line; text that looks like an interpolation stays text."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{yaml_value(str(key))}: {yaml_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_value, value)) + "]"
    if isinstance(value, str):
        text = value if isinstance(value, VariableText) else value.replace("${", "\\${")
        is_plain = _PLAIN.fullmatch(text) and not _NOT_TEXT.fullmatch(text)
        return text if is_plain else _UNPRINTABLE.sub(_escape, json.dumps(text, ensure_ascii=False))
    return shown(value)


def _escape(found: re.Match[str]) -> str:
    """Return a character as a quoted text of YAML spells it, unless it can be printed."""
    character = found[0]
    code = ord(character)
    return character if character.isprintable() else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def compact(value: Any) -> str:
    """Return a value as it is written in an override; a long one is cut."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {compact(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(compact, value)) + "]"
    if not isinstance(value, str):
        return shown(value)
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}... ({len(value)} characters)"
