"""Documentation from the schema: key, type, default, allowed values, users of a setting, docstring."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing
from collections.abc import Sequence
from functools import cache
from typing import Any

from hwgrpo.config import schema
from hwgrpo.config.fields import AnyOf, Limits
from hwgrpo.config.typed import hints_of
from hwgrpo.config.uses import default_of, describe


@dataclasses.dataclass(frozen=True)
class Entry:
    """One setting, documented."""

    key: str
    type: str
    default: str
    allowed: str
    used_by: str
    """The settings without which it has no effect, e.g. `trainer.strategy=fsdp2`; "" where it always has one."""
    doc: str


@cache
def entries() -> tuple[Entry, ...]:
    """Return every setting in the schema's order, dotted keys, lists of sections as `functions[]`."""
    return tuple(_walk(schema.Settings, "", _docstrings(), ()))


def _walk(
    section: type, prefix: str, docs: dict[tuple[str, str], str], inherited: Sequence[AnyOf]
) -> typing.Iterator[Entry]:
    hints = hints_of(section)
    written = section.__annotations__
    for field in dataclasses.fields(section):
        key = f"{prefix}{field.name}"
        hint = hints[field.name]
        conditions = (*inherited, *field.metadata.get("used_by", ()))
        if dataclasses.is_dataclass(hint):
            yield from _walk(hint, key + ".", docs, conditions)  # type: ignore[arg-type]
            continue
        limits: Limits | None = field.metadata.get("limits")
        yield Entry(
            key=key,
            type=re.sub(r"Literal\['(\w+)'\]", r"\1", str(written[field.name])),
            default=_default(field),
            allowed=limits.describe() if limits else "",
            used_by=" and ".join(describe(condition, prefix) for condition in conditions),
            doc=docs.get((section.__name__, field.name), ""),
        )
        element = typing.get_args(hint)[0] if typing.get_origin(hint) is list else None
        if dataclasses.is_dataclass(element):
            yield from _walk(element, key + "[].", docs, conditions)  # type: ignore[arg-type]


def _default(field: dataclasses.Field[Any]) -> str:
    value = default_of(field)
    if value == "???":
        return "(required)"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if str(value).isprintable() else repr(value)


def _docstrings() -> dict[tuple[str, str], str]:
    """Collect the string under each field of each class of settings."""
    docs: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                docs[(node.name, field.target.id)] = " ".join(below.value.value.split())
    return docs
