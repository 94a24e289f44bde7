"""Hydra's overrides (`k=v`, `+k=v`, `++k=v`, `~k`) and its values, and resolved YAML files of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hwgrpo.config.yaml_text import read_yaml
from hwgrpo.errors import ConfigError, shown

_OVERRIDE = re.compile(r"([+]{0,2}|~)([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*)"), re.compile(r"[-+]?(?:\d[\d_]*\.\d*|\.\d+|\d[\d_]*)(?:[eE][-+]?\d+)?")
_CONSTANTS = {"true": True, "false": False, "null": None}
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")


@dataclass(frozen=True)
class Override:
    """One override."""

    key: str
    value: Any
    """None also where it deletes the key."""
    deletes: bool = False


def parse_override(text: str) -> Override:
    """Return an override of Hydra's command line.

    Raises:
        ConfigError: it is none, its value is not closed, or it is a sweep over several values.
    """
    found = _OVERRIDE.fullmatch(text.strip())
    if found is None or (found[3] is None and found[1] != "~"):
        raise ConfigError(f"{shown(text)} is no setting of verl: write key=value, as data.train_batch_size=256")
    return Override(found[2], None if found[3] is None else parse_value(found[3], found[2]), found[1] == "~")


def parse_value(text: str, key: str) -> Any:
    """Return the value of an override: a number, true, null, text, a list or a mapping."""
    reader = _ValueReader(text, key)
    return reader.all()


class _ValueReader:
    def __init__(self, text: str, key: str) -> None:
        self._text, self._key, self._at = text.strip(), key, 0

    def all(self) -> Any:
        """Return the value that the text is."""
        if self._text[:1] not in ("[", "{", "'", '"'):
            return _primitive(self._single())
        value = self._value("")
        return value if self._at == len(self._text) else _primitive(self._single())

    def _single(self) -> str:
        """Return the text, which is one value.

        Raises:
            ConfigError: commas outside quotes and brackets make it a sweep.
        """
        hidden = re.sub(r"'[^']*'|\"[^\"]*\"|\\.", "", self._text)
        while (shorter := re.sub(r"\[[^][{}()]*\]|\{[^][{}()]*\}|\([^][{}()]*\)", "", hidden)) != hidden:
            hidden = shorter
        if "," in hidden and "\ue000" not in hidden:  # what is not known may have the quotes
            raise ConfigError(
                f"{self._key}={self._text}: Hydra reads the comma as a sweep over several runs, which verl refuses; a "
                f"list is {self._key}=[{self._text}], a text with commas {self._key}='{self._text}'"
            )
        return self._text

    def _blanks(self) -> str:
        """Skip blanks; return the next character, "" at the end."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _value(self, ends: str) -> Any:
        here = self._blanks()
        if here == "[":
            return [value for _, value in self._items("]", named=False)]
        if here == "{":
            return dict(self._items("}", named=True))
        if here and here in "'\"":
            return self._quoted(here)
        start, depth = self._at, 0
        while self._at < len(self._text) and (depth or self._text[self._at] not in ends):
            depth += {"{": 1, "}": -1}.get(self._text[self._at], 0)
            self._at += 1
        return _primitive(self._text[start : self._at].strip())

    def _items(self, end: str, *, named: bool) -> Iterator[tuple[str, Any]]:
        self._at += 1
        while (here := self._blanks()) != end:
            if not here:
                raise ConfigError(f"{self._key}={shown(self._text)}: a bracket is not closed")
            name = ""
            if named:
                name = str(self._value(":"))
                if self._blanks() != ":":
                    raise ConfigError(f"{self._key}={shown(self._text)}: a colon is missing after {shown(name)}")
                self._at += 1
            yield name, self._value("," + end)
            if self._blanks() == ",":
                self._at += 1
            elif self._blanks() != end:
                raise ConfigError(f"{self._key}={shown(self._text)}: a comma or {end} is missing")
        self._at += 1

    def _quoted(self, quote: str) -> str:
        end = re.compile(rf"(?:\\.|[^\\{quote}])*{quote}", re.DOTALL).match(self._text, self._at + 1)
        if end is None:
            raise ConfigError(f"{self._key}={shown(self._text)}: a quote is not closed")
        self._at = end.end()
        return end[0][:-1].replace(f"\\{quote}", quote)


def _primitive(text: str) -> Any:
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if _NUMBER[0].fullmatch(text):
        return int(text)
    if _NUMBER[1].fullmatch(text):
        return float(text)
    return text


def read_resolved(text: str, name: str) -> dict[str, Any]:
    """Return the settings of a Hydra YAML file, dotted key -> value; a mapping without content is a value.

    Raises:
        ConfigError: it is not valid YAML, or no mapping.
    """
    tree = read_yaml(text, name, Any)
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{name} is no mapping of settings: name a YAML file that Hydra wrote, as .hydra/config.yaml")
    return dict(flattened(tree))


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each single value of nested mappings; `_target_` is Hydra's own."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{name}.")
        elif name not in ("_target_", "defaults"):
            yield f"{prefix}{name}", value


def resolve(
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    keys: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Return settings with their interpolations resolved: other keys, `.sibling`, `oc.env:NAME,default`, `oc.select`.

    Args:
        settings: dotted key -> value.
        defaults: values of keys that are not set.
        environment: variables.
        keys: those to resolve and return; None: all.

    Raises:
        ConfigError: an interpolation names nothing, or itself; it names the key.
    """
    resolver = _Resolver(settings, defaults, environment)
    chosen = settings if keys is None else keys
    return {key: resolver.resolved(key, settings[key], (key,)) for key in chosen}


@dataclass(frozen=True)
class _Resolver:
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any]
    environment: Mapping[str, str]

    def resolved(self, key: str, value: Any, path: tuple[str, ...]) -> Any:
        """Return the value of a key; `path` has the keys that refer to it."""
        if isinstance(value, list):
            return [self.resolved(key, each, path) for each in value]
        if isinstance(value, Mapping):
            return {name: self.resolved(key, each, path) for name, each in value.items()}
        while isinstance(value, str) and (found := _INNERMOST.search(value)) is not None:
            inner = self._referred(key, found[1].strip(), path)
            value = inner if found[0] == value else f"{value[: found.start()]}{inner}{value[found.end() :]}"
        return value

    def _referred(self, key: str, source: str, path: tuple[str, ...]) -> Any:
        resolver, colon, rest = source.partition(":")
        name, comma, default = (rest if colon else source).partition(",")
        name = name.strip()
        if colon and resolver == "oc.env":
            if name in self.environment:
                return self.environment[name]
            if comma:
                return _primitive(default.strip().strip("'\""))
            raise ConfigError(f"{key}=${{{source}}}: the environment variable {name} is not set; export it")
        if colon and resolver != "oc.select":
            raise ConfigError(f"{key}=${{{source}}}: the resolver {resolver} is not known here; write the value itself")
        if name.startswith("."):
            up = len(name) - len(name.lstrip("."))
            name = ".".join([*key.split(".")[:-up], name.lstrip(".")])
        if name in path:
            raise ConfigError(f"{key}=${{{source}}} refers to itself; write the value itself")
        if name in self.settings:
            return self.resolved(name, self.settings[name], (*path, name))
        if self.defaults.get(name) is not None:
            return self.defaults[name]
        start = f"{name}."
        below = {each.removeprefix(start): value for each, value in self.settings.items() if each.startswith(start)}
        if below:
            return below
        if colon:
            return _primitive(default.strip().strip("'\"")) if comma else None
        if name in self.defaults:
            return None
        raise ConfigError(f"{key}=${{{source}}}: {name} is not set; write the value itself")
