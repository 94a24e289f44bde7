"""How a reward function or class is found, which form its parameters give it, and checks of the config's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hwgrpo import user_code
from hwgrpo.catalog import REWARDS
from hwgrpo.errors import ConfigError, DataError, choice_error, nearest
from hwgrpo.rewards.functions import OPENED, TRL, TRL_SERVICES, VERL, RewardFunction
from hwgrpo.support.given_objects import find_object, is_object, name_of
from hwgrpo.user_code import describe_error, raised_by_user_code

BATCH = ("batch", "completions")
FORM_PARAMETERS = ("solution_str", "batch", *TRL)
"""Parameters that decide the form."""
SIGNATURES = (
    "accepted are (data_source, solution_str, ground_truth, extra_info=None, **kwargs) called per sample as in verl, "
    "(prompts, completions, completion_ids, **columns) called with lists as in TRL, and (batch, completions, **kwargs)"
)


def make_reward_function(
    name: str, call: Callable[..., Any], kwargs: Mapping[str, Any], context: Mapping[str, Any], key: str
) -> RewardFunction:
    """Detect a function's form and check its arguments from the config, a registered one by its `check_arguments`, too.

    Args:
        name: name in metrics and messages.
        call: the function.
        kwargs: its `kwargs` in the config.
        context: values passed to functions with such parameters, e.g. max_response_tokens.
        key: the setting, for messages ("reward.functions[0]").

    Raises:
        ConfigError: the signature is none of the accepted ones or more than one; an argument is unknown or missing.
    """
    signature = inspect.signature(call).parameters
    kinds = {parameter: entry.kind for parameter, entry in signature.items()}
    open_ended = inspect.Parameter.VAR_KEYWORD in kinds.values()
    named = {
        parameter: entry
        for parameter, entry in signature.items()
        if entry.kind in (entry.POSITIONAL_OR_KEYWORD, entry.KEYWORD_ONLY)
    }
    form = form_of(name, set(named), key)
    if any(kind == inspect.Parameter.POSITIONAL_ONLY for kind in kinds.values()):
        raise ConfigError(f"{key}: {name} has positional-only parameters; arguments are passed by name")

    trainer_arguments = {"verl": (*VERL, OPENED), "trl": (*TRL, *TRL_SERVICES), "batch": BATCH}[form]
    kwargs = {
        **{
            parameter: value
            for parameter, value in context.items()
            if parameter in named and parameter not in trainer_arguments
        },
        **kwargs,
    }
    free = sorted(set(named) - set(trainer_arguments))
    for parameter in kwargs:
        if parameter in trainer_arguments:
            raise ConfigError(f"{key}.kwargs.{parameter}: the trainer passes {parameter!r} to {name}; remove it")
        if parameter not in named and not open_ended:
            raise (
                choice_error(f"{key}.kwargs: argument of {name}", parameter, free)
                if free
                else ConfigError(f"{key}.kwargs.{parameter}: {name} accepts no further arguments; remove it")
            )
    required = frozenset(parameter for parameter, entry in named.items() if entry.default is inspect.Parameter.empty)
    absent = sorted(required - set(trainer_arguments) - set(kwargs))
    if absent and form != "trl":  # in TRL's form they are data columns
        raise ConfigError(f"{key}: {name} needs {', '.join(absent)}; set {key}.kwargs.{absent[0]}")
    check_arguments = getattr(call, "check_arguments", None)
    if check_arguments is not None and REWARDS.has_loaded(call):
        check_arguments(**kwargs)
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
    return RewardFunction(
        name, form, frozenset(named), required, open_ended, frozenset(kwargs), is_async, call=call, kwargs=kwargs
    )


def form_of(name: str, parameters: set[str], key: str) -> str:
    """Return the form of a function by its parameters: "verl", "trl" or "batch".

    Raises:
        ConfigError: they are those of no form, or of more than one.
    """
    forms = []
    if "solution_str" in parameters:
        forms.append("verl")
    if "batch" in parameters:
        forms.append("batch")
    elif parameters & set(TRL):
        forms.append("trl")
    if len(forms) != 1:
        has = f"its parameters are: {', '.join(sorted(parameters)) or 'none'}"
        near = next(
            (
                f" (did you mean {hit!r}?)"
                for parameter in sorted(parameters)
                if (hit := nearest(parameter, FORM_PARAMETERS))
            ),
            "",
        )
        what = "mixes two signatures" if forms else "has none of the accepted signatures"
        raise ConfigError(f"{key}: {name} {what}; {has}{near if not forms else ''}; {SIGNATURES}")
    return forms[0]


DEFAULT_FUNCTION = "compute_score"


def load_function(name: str, key: str) -> tuple[str, Callable[..., Any]]:
    """Find a reward function.

    Args:
        name: a registered name, `path/to/file.py:function`, `path/to/file.py` (its `compute_score`), or `object://NAME`.
        key: the setting, for messages ("reward.functions[0].name").

    Returns:
        (short name for metrics, the function).

    Raises:
        ConfigError: unknown name; the message lists the registered ones.
    """
    file, function = split_name(name)
    if is_object(name):
        return function, find_object(name, key)
    if file is None:
        if name not in REWARDS:
            error = choice_error(key, name, REWARDS.names())
            raise ConfigError(f"{error} A function of your own is named {user_code.FORM}.")
        return name, REWARDS.load(name)
    return function, user_code.load_function(name, key, DEFAULT_FUNCTION)


def split_name(name: str) -> tuple[str | None, str]:
    """Return the file in a reward's name (None for a registered one, an object) and the function's name in metrics."""
    return (None, name_of(name)) if is_object(name) else user_code.split_name(name, DEFAULT_FUNCTION)


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
        DataError: raised by the class.
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
    except (ConfigError, DataError):
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
