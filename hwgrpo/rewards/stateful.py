"""Rewards with state: a class, made once per run, whose objects are called like functions and may be closed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hwgrpo.errors import ConfigError, choice_error
from hwgrpo.user_code import describe_error, raised_by_user_code


def make_instance(
    made: Callable[..., Any], name: str, kwargs: Mapping[str, Any], given: Mapping[str, Any], key: str
) -> Any:
    """Make the object of a reward's class.

    Args:
        made: the class; its objects have a `__call__` with one of the signatures of reward functions, and may have a
            `close()`.
        name: name in metrics and messages.
        kwargs: arguments of the class, from the config.
        given: what the trainer passes to parameters of these names: `device` (torch.device of the run), `steps` (the
            `StepFinder`, or None), `name`, `key` (the setting, for messages), `max_response_tokens`,
            `template_date` (the run's date for chat templates with a clock).
        key: the setting, for messages ("reward.functions[0]").

    Raises:
        ConfigError: an argument is unknown, missing or wrong, or the class raised.
    """
    parameters = inspect.signature(made).parameters
    open_ended = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    named = {
        parameter: entry
        for parameter, entry in parameters.items()
        if entry.kind in (entry.POSITIONAL_OR_KEYWORD, entry.KEYWORD_ONLY)
    }
    passed = {parameter: value for parameter, value in given.items() if parameter in named}
    for parameter in kwargs:
        if parameter in passed and parameter != "max_response_tokens":
            raise ConfigError(f"{key}.kwargs.{parameter}: the trainer passes {parameter!r} to {name}; remove it")
        if parameter not in named and not open_ended:
            raise choice_error(f"{key}.kwargs: argument of {name}", parameter, sorted(set(named) - set(passed)))
    arguments = {**passed, **kwargs}
    absent = [each for each, entry in named.items() if entry.default is entry.empty and each not in arguments]
    if absent:
        raise ConfigError(f"{key}: {name} needs {', '.join(absent)}; set {key}.kwargs.{absent[0]}")
    try:
        return made(**arguments)
    except ConfigError:
        raise
    except BaseException as error:
        if not raised_by_user_code(error):
            raise
        raise ConfigError(f"{key}: {name} cannot be made: {describe_error(error)}") from error


def refuse_class(call: Callable[..., Any], name: str, key: str) -> None:
    """Raise `ConfigError` if a reward for separate processes has state."""
    if inspect.isclass(call):
        raise ConfigError(
            f"{key}: {name} has state and is called in the trainer's process, so timeout and workers cannot be used; "
            "remove them. A reward that sends requests limits their time by its kwargs"
        )
