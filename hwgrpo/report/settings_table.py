"""The configuration of a run, one row per setting, beside the default of the schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hwgrpo.config import Config
from hwgrpo.config.document import entries
from hwgrpo.config.written_config import shown_settings


def setting_rows(config: Mapping[str, Any]) -> list[tuple[str, str, str | None, str]]:
    """Return (key, value, default, meaning) per setting in the order of the file.

    Args:
        config: the content of config.yaml.

    Returns:
        Values as YAML spells them, secrets hidden; the default is None where the schema has no such key (a run of
        another version).
    """
    known = {entry.key: entry for entry in entries()}
    rows = []
    for key, value in _leaves(shown_settings(config, Config), ""):
        entry = known.get(re.sub(r"\[\d+\]", "[]", key))
        rows.append((key, _show(value), entry.default if entry else None, entry.doc if entry else ""))
    return rows


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{key}[{i}]")
    else:
        yield key, value


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
