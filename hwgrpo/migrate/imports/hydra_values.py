"""Hydra's overrides (`k=v`, `+k=v`, `++k=v`, `~k`) and its values, and resolved YAML files of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hwgrpo.config.yaml_text import read_yaml
from hwgrpo.errors import ConfigError, shown
from hwgrpo.migrate.imports.reading_budget import MOST_DIGITS, Budget, check_depth
from hwgrpo.migrate.imports.script_command import MARK
from hwgrpo.migrate.imports.variable_text import VariableText, joined, known
from hwgrpo.support.text import is_secret, remember_secrets

_OVERRIDE = re.compile(r"([+]{0,2}|~)([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*)"), re.compile(r"[-+]?(?:\d[\d_]*\.\d*|\.\d+|\d[\d_]*)(?:[eE][-+]?\d+)?")
_CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class Override:
    """One override."""

    key: str
    value: Any
    """None also where it deletes the key."""
    deletes: bool = False
    adds: bool = False
    """Whether it is a key that the project's config does not have, `+key`."""


def parse_override(text: str) -> Override:
    """Return an override of Hydra's command line.

    Raises:
        ConfigError: it is none, its value is not closed, or it is a sweep over several values.
    """
    found = _OVERRIDE.fullmatch(text.strip())
    if found is None or (found[3] is None and found[1] != "~"):
        raise ConfigError(f"{shown(text)} is no setting of verl: write key=value, as data.train_batch_size=256")
    return Override(
        found[2], None if found[3] is None else parse_value(found[3], found[2]), found[1] == "~", found[1] == "+"
    )


def parse_value(text: str, key: str) -> Any:
    """Return the value of an override: a number, true, null, text, a list or a mapping."""
    reader = _ValueReader(text, key)
    return reader.all()


class _ValueReader:
    def __init__(self, text: str, key: str) -> None:
        self._text, self._key, self._at, self._depth = text.strip(), key, 0, 0

    def all(self) -> Any:
        """Return the value that the text is."""
        if self._text[:1] not in ("[", "{", "'", '"'):
            return primitive(self._single())
        value = self._value("")
        return value if self._at == len(self._text) else primitive(self._single())

    def _single(self) -> str:
        """Return the text, which is one value.

        Raises:
            ConfigError: commas outside quotes and brackets make it a sweep.
        """
        hidden, depth = re.sub(r"'[^']*'|\"[^\"]*\"|\\.", "", self._text), 0
        while (shorter := re.sub(r"\[[^][{}()]*\]|\{[^][{}()]*\}|\([^][{}()]*\)", "", hidden)) != hidden:
            hidden, depth = shorter, depth + 1
            check_depth(depth, self._key)
        if "," in hidden and not MARK.search(hidden):  # what is not known may have the quotes
            text = self._text if len(self._text) <= 120 else "..."
            raise ConfigError(
                f"{self._key}={text}: Hydra reads the comma as a sweep over several runs, which verl refuses; a "
                f"list is {self._key}=[{text}], a text with commas {self._key}='{text}'"
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
        return primitive(self._text[start : self._at].strip())

    def _items(self, end: str, *, named: bool) -> Iterator[tuple[str, Any]]:
        self._at += 1
        self._depth += 1
        check_depth(self._depth, self._key)
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
        self._depth -= 1

    def _quoted(self, quote: str) -> str:
        end = re.compile(rf"(?:\\.|[^\\{quote}])*{quote}", re.DOTALL).match(self._text, self._at + 1)
        if end is None:
            raise ConfigError(f"{self._key}={shown(self._text)}: a quote is not closed")
        self._at = end.end()
        return end[0][:-1].replace(f"\\{quote}", quote)


def primitive(text: str) -> Any:
    """Return the number, truth value or null that a text is, else the text."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if len(text) > MOST_DIGITS:
        return text
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


def resolve(settings: Mapping[str, Any], defaults: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return settings with their interpolations resolved: other keys, `.sibling`, `oc.env:NAME,default`, `oc.select`.

    Values of variables stay interpolations, as `VariableText`.

    Args:
        settings: dotted key -> value.
        defaults: values of keys that are not set.
        environment: variables.

    Raises:
        ConfigError: an interpolation names nothing, or itself, or they make too much text; it names the key.
    """
    resolver = Resolver(settings, defaults, environment)
    return {key: resolver.resolved(key) for key in settings}


def pieces_of(text: str, key: str) -> list[tuple[bool, str]]:
    """Return the pieces of a text: whether each is the inside of an interpolation, and its text.

    Raises:
        ConfigError: interpolations are nested too deep.
    """
    pieces, literal, opened = [], 0, []
    for found in re.finditer(r"\$\{|\}", text):
        if found[0] != "}":
            opened.append(found.start())
            check_depth(len(opened), key)
        elif len(opened) > 1:
            opened.pop()
        elif opened:
            start = opened.pop()
            pieces += [(False, text[literal:start])] if start > literal else []
            pieces.append((True, text[start + 2 : found.start()]))
            literal = found.end()
    return [*pieces, (False, text[literal:])] if literal < len(text) or not pieces else pieces


class Resolver:
    """What resolves the interpolations of settings, each once."""

    def __init__(
        self, settings: Mapping[str, Any], defaults: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        self._settings, self._defaults, self._environment = settings, defaults, environment
        self._found: dict[str, Any] = {}
        self._below: dict[str, list[str]] = {}
        """Beginning of keys -> the keys."""
        self._budget, self._depth = Budget("the interpolations"), 0
        for key in settings:
            check_depth(key.count("."), shown(key))
            for dot in re.finditer(r"\.", key):
                self._below.setdefault(key[: dot.start()], []).append(key)

    def resolved(self, key: str, path: tuple[str, ...] = ()) -> Any:
        """Return the value of a setting; `path` has the keys that refer to it.

        Raises:
            ConfigError: as `resolve` does.
        """
        if not path:
            self._depth = 0
        if key not in self._found:
            if key in path:
                raise ConfigError(f"{key} refers to itself; write the value itself")
            self._found[key] = self._of(key, self._settings[key], (*path, key))
        return self._found[key]

    def _of(self, key: str, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [self._of(key, each, path) for each in value]
        if isinstance(value, Mapping):
            return {name: self._of(key, each, path) for name, each in value.items()}
        if not isinstance(value, str):
            self._budget.spend(1, key)
            return value
        return self._text(key, value, path)

    def _text(self, key: str, text: str, path: tuple[str, ...]) -> Any:
        """Return the value of a text, which is that of an interpolation if it is nothing else."""
        self._depth += 1
        check_depth(self._depth, key)
        pieces = [self._referred(key, each, path) if refers else each for refers, each in pieces_of(text, key)]
        self._depth -= 1
        if len(pieces) == 1:
            self._spend(key, pieces[0])
            return pieces[0]
        text = joined(*pieces)
        self._budget.spend(len(text) + len(known(text)), key)
        return text

    def _spend(self, key: str, value: Any) -> None:
        """Count a value, all that containers hold included: they are shared here, and not where they are written."""
        left = [value]
        while left:
            each = left.pop()
            left += each if isinstance(each, list) else each.values() if isinstance(each, Mapping) else ()
            self._budget.spend(1 + (len(each) if isinstance(each, str) else 0), key)

    def _referred(self, key: str, inner: str, path: tuple[str, ...]) -> Any:
        content = self._text(key, inner, path)
        source, written = str(known(content)).strip(), str(content).strip()
        place = f"{key}=${{{written}}}"
        resolver, colon, rest = source.partition(":")
        name, comma, default = (rest if colon else source).partition(",")
        name = name.strip()
        if colon and resolver == "oc.env":
            if name in self._environment:
                remember_secrets([self._environment[name]] if is_secret(name) else [])
                return VariableText(f"${{{written}}}", self._environment[name])
            if comma:
                return primitive(default.strip().strip("'\""))
            raise ConfigError(f"{place}: the environment variable {name} is not set; export it")
        if colon and resolver != "oc.select":
            raise ConfigError(f"{place}: the resolver {resolver} is not known here; write the value itself")
        if name.startswith("."):
            up = len(name) - len(name.lstrip("."))
            name = ".".join([*key.split(".")[:-up], name.lstrip(".")])
        if name in path:
            raise ConfigError(f"{place} refers to itself; write the value itself")
        if name in self._settings:
            return self.resolved(name, path)
        if self._defaults.get(name) is not None:
            return self._defaults[name]
        if name in self._below:
            return {each.removeprefix(f"{name}."): self.resolved(each, path) for each in self._below[name]}
        if colon:
            return primitive(default.strip().strip("'\"")) if comma else None
        if name in self._defaults:
            return None
        raise ConfigError(f"{place}: {name if source == written else written} is not set; write the value itself")
