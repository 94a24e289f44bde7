"""Detection of a reward function's form by its parameters, and checks of the config's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hwgrpo.catalog import REWARDS
from hwgrpo.errors import ConfigError, choice_error, nearest
from hwgrpo.rewards.functions import OPENED, TRL, TRL_SERVICES, VERL, RewardFunction

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
