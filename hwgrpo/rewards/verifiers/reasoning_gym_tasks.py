"""Tasks of the package reasoning-gym: `reasoning_gym://chain_sum?size=2000&seed=1&max_digits=2` -> its data set."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from hwgrpo.errors import ConfigError, choice_error, error_text

PREFIX = "reasoning_gym://"
INSTALL = 'pip install "hwgrpo[reasoning]"'
EXCLUDED = ("composite",)
"""A mixture of others; here a mixture is a list of addresses."""
SIZE, SEED = 500, 0
"""Defaults of every task: the package's own size, and a fixed seed where the package would draw one."""
BOOLEANS = {"true": True, "false": False}


class PackageMissing(ConfigError):
    """The package reasoning-gym cannot be imported. The message has the address and the command that installs it."""


@dataclass(frozen=True)
class TaskAddress:
    """One task with its difficulty settings."""

    address: str
    task: str
    size: int
    """Number of rows."""
    seed: int
    arguments: Mapping[str, Any]
    """Further settings of the package's config of this task."""

    def dataset(self, size: int | None = None) -> Any:
        """Return the package's data set, with another size if given.

        Raises:
            ConfigError: the package refuses the settings.
        """
        settings = {**self.arguments, "size": self.size if size is None else size, "seed": self.seed}
        try:
            return _package(self.address).create_dataset(self.task, **settings)
        except Exception as error:  # its checks raise AssertionError, some tasks others
            raise _refused(self.address, error) from error


@functools.lru_cache(maxsize=64)
def parse_address(address: str) -> TaskAddress:
    """Read an address `reasoning_gym://TASK?size=2000&seed=1&...`; `+` is itself, `%20` a space, `,` separates items.

    Raises:
        PackageMissing: it cannot be imported.
        ConfigError: the task or an argument is unknown, or a value has another type or is refused by the package.
    """
    assert address.startswith(PREFIX), address
    datasets = {name: kind for name, kind in _package(address).DATASETS.items() if name not in EXCLUDED}
    task, _, query = address.removeprefix(PREFIX).partition("?")
    if task not in datasets:
        raise choice_error(f"{address}: task", task, datasets)
    config = datasets[task][1]
    defaults = {field.name: _default(field) for field in dataclasses.fields(config)} | {"size": SIZE, "seed": SEED}
    arguments: dict[str, Any] = {}
    for pair in filter(None, query.split("&")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{address}: {pair!r} is not argument=value; arguments of {task}: {', '.join(defaults)}")
        if key not in defaults:
            raise choice_error(f"{address}: argument", key, defaults)
        arguments[key] = _value(unquote(value), defaults[key], f"{address}: {key}={unquote(value)!r}")
    if arguments.get("size", SIZE) < 1:
        raise ConfigError(f"{address}: size={arguments['size']} is no number of rows; use 1 or more")
    size, seed = arguments.pop("size", SIZE), arguments.pop("seed", SEED)
    try:
        settings = config(**arguments, size=size, seed=seed)
        if hasattr(settings, "validate"):
            settings.validate()
    except Exception as error:  # AssertionError, mostly
        raise _refused(address, error) from error
    return TaskAddress(address, task, size, seed, arguments)


def check_address(address: str, key: str) -> None:
    """Raise what `parse_address` does, with the key of the setting that has the address."""
    try:
        parse_address(address)
    except ConfigError as error:
        raise type(error)(f"{key}={error}") from error


@functools.cache
def version() -> str:
    """Return the installed version of the package."""
    return importlib.metadata.version("reasoning-gym")


def _package(address: str) -> Any:
    try:
        return importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise PackageMissing(f"{address} needs the package reasoning-gym ({error_text(error)}): {INSTALL}") from error


def _refused(address: str, error: Exception) -> ConfigError:
    why = error_text(error, 300) or type(error).__name__
    return ConfigError(f"{address}: the package reasoning-gym refuses these arguments: {why}; change them")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _value(text: str, default: Any, where: str) -> Any:
    """Return a value of the default's type.

    Args:
        text: as written.
        default: a list or tuple takes items of the type of its first; None takes a number or text.
        where: address, key and value, for messages.

    Raises:
        ConfigError: the text is none of that type, or no text can be.
    """
    if isinstance(default, list | tuple):
        of = default[0] if default else None
        return type(default)(_value(item, of, where) for item in text.split(","))
    if isinstance(default, bool):
        if text not in BOOLEANS:
            raise ConfigError(f"{where} must be true or false")
        return BOOLEANS[text]
    if isinstance(default, enum.Enum):
        names = [each.value for each in type(default)]
        if text not in names:
            raise choice_error(where.rpartition("=")[0], text, names)
        return type(default)(text)
    if isinstance(default, int | float):
        try:
            return type(default)(text)
        except ValueError:
            kind = "a whole number" if isinstance(default, int) else "a number"
            raise ConfigError(f"{where} must be {kind}; the default is {default}") from None
    if isinstance(default, str):
        return text
    if default is None:
        return _number(text)
    raise ConfigError(f"{where} cannot be set in an address, where a {type(default).__name__} has no form; remove it")


def _number(text: str) -> int | float | str:
    """Return a text as the number that it is, if it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
