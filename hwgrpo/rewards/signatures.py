"""The form of a reward function, by the names of its parameters, and the arguments that the config gives it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hwgrpo.errors import ConfigError, choice_error, nearest
from hwgrpo.rewards.functions import TRL, TRL_SERVICES, VERL, RewardFunction

BATCH = ("batch", "completions")
TELLING = ("solution_str", "batch", *TRL)
"""Parameters that tell the form."""
SIGNATURES = (
    "accepted are (data_source, solution_str, ground_truth, extra_info=None, **kwargs) called per sample as in verl, "
    "(prompts, completions, completion_ids, **columns) called with lists as in TRL, and (batch, completions, **kwargs)"
)


def adapt(
    name: str, call: Callable[..., Any], kwargs: Mapping[str, Any], context: Mapping[str, Any], key: str
) -> RewardFunction:
    """Tell a function's form and check the arguments that the config gives it.

    Args:
        name: what metrics and messages call it.
        call: the function.
        kwargs: its `kwargs` in the config.
        context: values that are offered to functions that name them, e.g. max_response_tokens.
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
    form = _form(name, set(named), key)
    if any(kind == inspect.Parameter.POSITIONAL_ONLY for kind in kinds.values()):
        raise ConfigError(f"{key}: {name} has positional-only parameters; arguments are passed by name")

    given = {"verl": VERL, "trl": (*TRL, *TRL_SERVICES), "batch": BATCH}[form]
    kwargs = {**{word: value for word, value in context.items() if word in named and word not in given}, **kwargs}
    free = sorted(set(named) - set(given))
    for word in kwargs:
        if word in given:
            raise ConfigError(f"{key}.kwargs.{word}: the trainer passes {word!r} to {name}; remove it")
        if word not in named and not open_ended:
            raise (
                choice_error(f"{key}.kwargs: argument of {name}", word, free)
                if free
                else ConfigError(f"{key}.kwargs.{word}: {name} accepts no further arguments; remove it")
            )
    required = frozenset(word for word, entry in named.items() if entry.default is inspect.Parameter.empty)
    absent = sorted(required - set(given) - set(kwargs))
    if absent and form != "trl":  # in TRL's form they are data columns
        raise ConfigError(f"{key}: {name} needs {', '.join(absent)}; set {key}.kwargs.{absent[0]}")
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
    return RewardFunction(
        name, form, frozenset(named), required, open_ended, frozenset(kwargs), is_async, call=call, kwargs=kwargs
    )


def _form(name: str, parameters: set[str], key: str) -> str:
    forms = []
    if "solution_str" in parameters:
        forms.append("verl")
    if "batch" in parameters:
        forms.append("batch")
    elif parameters & set(TRL):
        forms.append("trl")
    if len(forms) != 1:
        has = f"its parameters are: {', '.join(sorted(parameters)) or 'none'}"
        near = next((f" (did you mean {hit!r}?)" for word in sorted(parameters) if (hit := nearest(word, TELLING))), "")
        what = "mixes two signatures" if forms else "has none of the accepted signatures"
        raise ConfigError(f"{key}: {name} {what}; {has}{near if not forms else ''}; {SIGNATURES}")
    return forms[0]
