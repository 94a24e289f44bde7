"""Keyword arguments from settings (`algorithm.loss.kwargs`, ...), bound to a registered or a user-defined function.

A function declares what its arguments may be in its signature: numbers by `Annotated` with `Limits`, as settings have
them, and `Below` another argument; alternatives by `Literal`.

Example:
    >>> def my_loss(x, config, *, cap: Annotated[float, Limits(above=0)] = 20.0): ...
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hwgrpo.config.fields import Limits
from hwgrpo.errors import ConfigError, shown


@dataclass(frozen=True)
class Below:
    """Declares that an argument is smaller than another one of the same function."""

    other: str


def bind_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], positional: int, key: str
) -> Callable[..., Any]:
    """Return a function with some keyword arguments bound.

    Args:
        function: a user-defined or registered function.
        arguments: value of the setting `key`.
        positional: number of its positional arguments.
        key: key of the setting, for messages.

    Raises:
        ConfigError: it does not accept these arguments, or one is outside of what its signature declares.
    """
    try:
        inspect.signature(function).bind(*[None] * positional, **arguments)
    except TypeError as error:
        called = f"{getattr(function, '__name__', type(function).__name__)}{inspect.signature(function)}"
        raise ConfigError(
            f"{key}={shown(dict(arguments))}: {called} is called with {positional} arguments and these: {error}"
        ) from error
    check_arguments(function, arguments, key)
    return functools.partial(function, **arguments) if arguments else function


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], key: str) -> None:
    """Check keyword arguments against what the signature of their function declares.

    Args:
        function, arguments, key: as for `bind_arguments`.

    Raises:
        ConfigError: one is outside of it.
    """
    if not arguments:
        return
    values = {name: each.default for name, each in inspect.signature(function).parameters.items()} | {**arguments}
    for name, annotation in declared_arguments(function).items():
        others = [each.other for each in _declarations(annotation) if isinstance(each, Below)]
        if arguments.keys() & {name, *others}:
            _check(name, values, annotation, others, key)


def own_arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only arguments of a function, those of its settings `kwargs`, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def declared_arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a function that its signature limits, each with its annotation."""
    try:
        hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    except (AttributeError, NameError, TypeError):  # a user's annotations that only a type checker can read
        return {}
    return {name: hint for name, hint in hints.items() if _declarations(hint) or typing.get_origin(hint) is Literal}


def describe_argument(annotation: Any) -> str:
    """Return what an annotation allows, as text."""
    if typing.get_origin(annotation) is Literal:
        return " or ".join(map(str, typing.get_args(annotation)))
    declared = _declarations(annotation)
    return ", ".join(f"below {each.other}" if isinstance(each, Below) else each.describe() for each in declared)


def _declarations(annotation: Any) -> list[Limits | Below]:
    return [each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Limits | Below)]


def _check(name: str, values: Mapping[str, Any], annotation: Any, others: Sequence[str], key: str) -> None:
    value = values[name]
    if typing.get_origin(annotation) is Literal:
        accepted = value in typing.get_args(annotation)
    else:
        accepted = type(value) in (int, float) and all(
            value < values[each.other] if isinstance(each, Below) else each.accepts(value)
            for each in _declarations(annotation)
        )
    if not accepted:
        beside = "".join(f" with {other}={shown(values[other])}" for other in others)
        raise ConfigError(
            f"{key}.{name}={shown(value)}{beside} is out of range; allowed: {describe_argument(annotation)}"
        )
