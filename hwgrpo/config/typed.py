"""Plain values become the schema's dataclasses, by its type hints, and nothing else passes.

A number is no bool, a text is no number, and a fraction is no integer: a slip is refused rather than read as something.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
import types
import typing
from collections.abc import Mapping
from typing import Any

import yaml
from omegaconf import MISSING

from hwgrpo.config.fields import Limits
from hwgrpo.errors import ConfigError, shown
from hwgrpo.support.paths import with_home
from hwgrpo.user_code import names_a_file

_TEXT = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"
_LONGEST = 140
"""Characters of an override that an error suggests."""
_PLAIN = re.compile(r"[\w./@+~$](?:[\w./:@+~&$ -]*[\w./@+~])?")
"""Text that YAML reads as it is, in a list, too."""
_FOR_SHELL = re.compile(r"[\w./:@%+~=,\[\]-]+")
"""An override that shells pass as it is."""
_MEANT = {
    "model": ("path",),
    "model.lora": ("rank", "adapter"),
    "data": ("train", "max_rows"),
    "rollout": ("engine", "n"),
    "rollout.server": ("url",),
    "reward": ("functions",),
    "algorithm": ("preset",),
    "algorithm.advantage": ("name",),
    "algorithm.loss": ("name",),
    "algorithm.kl": ("estimator", "coef"),
    "algorithm.aggregation": ("name",),
    "algorithm.correction": ("name",),
    "algorithm.filter_groups": ("enable", "metric"),
    "optim": ("name", "lr"),
    "trainer": ("strategy", "max_steps"),
    "trainer.deepspeed": ("stage",),
    "backend": ("name",),
    "observe": ("loggers",),
}
"""Section -> the settings of it that a single value in its place may be meant for; the first one of its type is."""


hints_of = functools.cache(typing.get_type_hints)
"""Types of the fields of a dataclass; evaluated once, since a configuration is walked many times."""


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types that a hint allows: `int | None` is int and NoneType."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def section_of(hint: Any) -> type | None:
    """Return the dataclass behind a type hint: itself, or the element of a list of them."""
    for kind in alternatives(hint):
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return kind
        if typing.get_origin(kind) is list and (inner := section_of(typing.get_args(kind)[0])):
            return inner
    return None


def is_list(hint: Any) -> bool:
    """Return whether a type hint allows a list."""
    return any(typing.get_origin(kind) is list for kind in alternatives(hint))


def hint_below(hint: Any, name: str) -> Any:
    """Return the type of `name` in a value of type `hint`; Any where the schema has none."""
    for kind in alternatives(hint):
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return hints_of(kind).get(name, Any)
        if typing.get_origin(kind) in (list, dict):
            return typing.get_args(kind)[-1]
    return Any


def read_text_as_written(node: yaml.Node, hint: Any) -> None:
    """Mark the plain scalars of text settings as text, so that `007`, `1.10` and `no` stay as written."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            read_text_as_written(value, hint_below(hint, name.value))
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            read_text_as_written(value, hint_below(hint, "") if is_list(hint) else Any)
    elif str in alternatives(hint) and node.tag != _NULL:
        node.tag = _TEXT


def build(hint: Any, value: Any, key: str, default: Any = None) -> Any:
    """Return `value` as an object of the type that the schema has for it.

    Args:
        hint: the type.
        value: plain: mappings, lists, text, numbers, bools and None.
        key: where it stands, for messages.
        default: default of the setting, for messages.

    Raises:
        ConfigError: it has another type, is text that cannot be stored, or is still to be set.
    """
    if value == MISSING:
        remedy = "" if default in (None, MISSING) else f", or leave it out for the default {default}"
        raise ConfigError(f"{key}={MISSING} marks a value that is still to be set; give it one{remedy}")
    kinds = alternatives(hint)
    if value is None and types.NoneType in kinds:
        return None
    for kind in kinds:
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return _build_section(kind, value, key)
        if typing.get_origin(kind) is list and isinstance(value, list):
            return [build(typing.get_args(kind)[0], element, f"{key}.{i}") for i, element in enumerate(value)]
        if typing.get_origin(kind) is dict and isinstance(value, Mapping):
            return {
                _checked_text(name, key): build(typing.get_args(kind)[1], inner, f"{key}.{name}")
                for name, inner in value.items()
            }
        if kind is Any:
            return _build_anything(value, key)
        if kind is str and isinstance(value, str):
            return _checked_text(value, key)
        if type(value) is kind and kind in (bool, int, float):
            return value
        if typing.get_origin(kind) is typing.Literal and isinstance(value, str) and value in typing.get_args(kind):
            return value
        if kind is float and type(value) is int:
            return _as_float(value, key)
    raise _wrong_type(kinds, value, key)


def _build_section(section: type, values: Any, key: str) -> Any:
    prefix = f"{key}." if key else ""
    if not isinstance(values, Mapping):
        names = ", ".join(field.name for field in dataclasses.fields(section))
        meant = _meant_setting(section, values, key)
        hint = f"; did you mean {meant}? Its keys are" if meant else " with the keys"
        raise ConfigError(f"{key}={shown(values)} must be a mapping{hint}: {names}")
    hints = hints_of(section)
    arguments = {}
    for field in dataclasses.fields(section):
        if field.name in values:
            default = _plain_default(field)
            value = build(hints[field.name], values[field.name], prefix + field.name, default)
            arguments[field.name] = with_home(value) if field.metadata.get("home") else value
        elif field.default == MISSING:
            raise ConfigError(
                f"{prefix}{field.name} is required and has no default; set it in the recipe or as "
                f"{prefix}{field.name}=..."
            )
        elif dataclasses.is_dataclass(hints[field.name]):  # a required setting below it is missing
            arguments[field.name] = build(hints[field.name], {}, prefix + field.name)
    return section(**arguments)


def _meant_setting(section: type, value: Any, key: str) -> str | None:
    """Return the override that a value in place of a section may be meant for, for a shell; None: there is none."""
    hints, fields = hints_of(section), {field.name: field for field in dataclasses.fields(section)}
    for name in _MEANT.get(key, ()) if value not in (None, "", []) else ():
        hint = hints[name]
        meant = [value] if is_list(hint) and str not in alternatives(hint) and not isinstance(value, list) else value
        try:
            build(list[str] if section_of(hint) else hint, meant, key)
        except ConfigError:
            continue
        text = f"{key}.{name}={_override_text(meant)}"
        if text.isprintable() and len(text) <= _LONGEST and _is_within_limits(meant, fields[name]):
            return text if _FOR_SHELL.fullmatch(text) else shlex.quote(text)
    return None


def _override_text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_override_text, value))}]"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    return shown(value)


def _is_within_limits(value: Any, field: dataclasses.Field[Any]) -> bool:
    """Return whether a value, or each entry of a list, is a known choice or a number that the field allows."""
    limits: Limits | None = field.metadata.get("limits")
    if limits is None:
        return True
    if isinstance(value, list):
        return all(_is_within_limits(each, field) for each in value)
    if (names := limits.names()) is None:
        return limits.accepts(value)
    return value in names or (limits.files and names_a_file(value))


def _plain_default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field for messages; None for a section, whose settings have their own."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    default = field.default_factory()
    return None if dataclasses.is_dataclass(default) else default


def _build_anything(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return {_checked_text(name, key): build(Any, inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list):
        return [build(Any, element, f"{key}.{i}") for i, element in enumerate(value)]
    if isinstance(value, str):
        return _checked_text(value, key)
    if value is None or type(value) in (bool, int, float):
        return value
    raise ConfigError(f"{key}={shown(value)} is a {type(value).__name__}; use text, numbers, bools, lists or mappings")


def _checked_text(value: Any, key: str) -> str:
    """Return text that can be written to a file and handed to the operating system."""
    if not isinstance(value, str):
        raise ConfigError(f"{key}: the name {shown(value)} must be text")
    if "\0" in value:
        raise ConfigError(
            f"{key}={shown(value)} contains a NUL character, which neither files nor tokenizers accept; remove it"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{key}={shown(value)} is not valid Unicode (character {error.start + 1} is a byte or half a character); "
            "write it in UTF-8"
        ) from None
    return value


def _as_float(value: int, key: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{key}={shown(value)} is out of range; allowed: a finite number") from None


def _wrong_type(kinds: tuple[Any, ...], value: Any, key: str) -> ConfigError:
    allowed = " or ".join(_named(kind) for kind in kinds)
    if str not in kinds and any(typing.get_origin(kind) is list for kind in kinds):
        element = {"reward.functions": "exact_match", "rollout.agent.tools": "python"}.get(key, "...")
        return ConfigError(f"{key}={shown(value)} must be a list, e.g. {key}=[{element}]")
    remedy = ""
    if bool in kinds:
        remedy = ": true or false"
    elif str in kinds and isinstance(value, (Mapping, list)):
        remedy = f"; put text with : , [ or {{ in quotes, e.g. {key}='\"a: b\"'"
    elif {int, float} & {*kinds} and isinstance(value, str):
        remedy = "" if any(typing.get_origin(kind) is typing.Literal for kind in kinds) else ", in decimal digits"
    elif int in kinds and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        remedy = f", e.g. {int(value)}"
    return ConfigError(f"{key}={shown(value)} has the wrong type; it must be {allowed}{remedy}")


def _named(kind: Any) -> str:
    """Return how an error names an allowed type."""
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(typing.get_args(kind))
    return "null" if kind is types.NoneType else kind.__name__ if type(kind) is type else str(kind)
