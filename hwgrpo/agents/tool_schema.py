"""JSON schemas of tools, from type hints and docstrings, and the check of a call's arguments."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

from hwgrpo.agents.call_formats import UntypedText
from hwgrpo.errors import ConfigError, choice_error, error_text, nearest, quoted

_OPEN = (inspect.Parameter.VAR_KEYWORD,)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
SHOWN = 60
"""Characters of a wrong value that a message shows."""


def make_schema(function: Callable[..., Any], kwargs: Mapping[str, Any], key: str, name: str | None = None) -> dict:
    """Return the JSON schema of a function for the chat template, by `transformers.utils.get_json_schema`.

    It has no "return", which schemas in requests to a server have not either, so that prompts are the same there.

    Args:
        function: has type hints and a docstring in Google's style, with each argument in `Args:`.
        kwargs: arguments that the config sets; the model does not see them, and they need neither.
        key: the tool's setting, for messages ("rollout.agent.tools.0").
        name: name of the tool; None: the function's.

    Raises:
        ConfigError: hints or docstring are missing, or `kwargs` has an argument that the function lacks.
    """
    from transformers.utils import chat_template_utils  # imports torch at its first use: not in every process

    name = name or str(getattr(function, "__name__", type(function).__name__))
    remedy = "give each argument a type hint, and a line in the docstring's Args"
    try:
        parameters = inspect.signature(function).parameters
        hints = typing.get_type_hints(function)
    except Exception as error:  # no function, or a hint whose name does not exist
        raise ConfigError(f"{key}.name: {name} has no readable signature: {error_text(error)}; {remedy}") from error
    by_position = [each.name for each in parameters.values() if each.kind in _BY_POSITION]
    if by_position:
        raise ConfigError(
            f"{key}.name: {name} has the positional-only argument {by_position[0]!r}; arguments are passed by name"
        )
    open_ended = any(each.kind in _OPEN for each in parameters.values())
    for argument in kwargs:
        if argument not in parameters and not open_ended:
            raise choice_error(f"{key}.kwargs: argument of {name}", argument, parameters)
    seen = {each: entry for each, entry in parameters.items() if entry.kind not in _OPEN and each not in kwargs}

    def visible() -> None: ...

    visible.__name__, visible.__doc__ = name, inspect.getdoc(function)
    visible.__annotations__ = {each: hint for each, hint in hints.items() if each in seen}
    setattr(visible, "__signature__", inspect.Signature(list(seen.values())))  # noqa: B010 - it has no type
    try:
        return _as_json(chat_template_utils.get_json_schema(visible))
    except Exception as error:  # of transformers, or a json.JSONDecodeError of a docstring's (choices: ...)
        hint = f", or set {key}.kwargs.{next(iter(seen))}" if seen else ""
        raise ConfigError(f"{key}.name: {name} has no JSON schema: {error_text(error)}; {remedy}{hint}") from error


def _as_json(schema: dict) -> dict:
    return json.loads(json.dumps(schema))  # as the trainer gets it from a process


class MalformedCall(Exception):
    """Arguments do not fit the schema. The message is for the model."""


def typed_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments, checked against the tool's schema.

    A number without fraction passes as `number`. Nothing else is converted, so that "5" is no integer, nor is 5.0; but
    `UntypedText`, of formats that write values without types, gets the type of the schema.

    Args:
        schema: as `make_schema` returns it.
        arguments: parameter -> value.

    Raises:
        MalformedCall: a parameter is unknown, missing, or has a wrong type.
    """
    function = schema["function"]
    name, parameters = function["name"], function["parameters"]
    properties = parameters["properties"]
    has = f"it has: {', '.join(properties)}" if properties else "it has none"
    for parameter in arguments:
        if parameter not in properties:
            near = nearest(str(parameter), properties)
            hint = f" Did you mean {near!r}?" if near else ""
            raise MalformedCall(f"{name} has no parameter {quoted(parameter, SHOWN)}; {has}.{hint}")
    for parameter in parameters.get("required", ()):
        if parameter not in arguments:
            raise MalformedCall(f"{name} needs the parameter {parameter!r}; {has}.")
    return {parameter: _typed(value, properties[parameter], parameter) for parameter, value in arguments.items()}


def _typed(value: Any, schema: Mapping[str, Any], place: str) -> Any:
    if isinstance(value, UntypedText):
        value = _value_of_text(value, schema)
    wrong = _wrong(value, schema, place)
    if wrong:
        raise MalformedCall(wrong)
    return value


def _value_of_text(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of a text without a type: that of its JSON, where the schema allows its type, else the text."""
    candidates: list[Any] = []
    try:
        candidates.append(json.loads(text))
    except (ValueError, RecursionError):
        # templates write Python's constants
        candidates += [value for name, value in (("True", True), ("False", False), ("None", None)) if text == name]
    allowed = str(text)
    if not _wrong(allowed, schema, ""):
        return allowed
    return next((each for each in candidates if not _wrong(each, schema, "")), candidates[0] if candidates else allowed)


def _wrong(value: Any, schema: Mapping[str, Any], place: str) -> str:
    """Return what is wrong with a value, "" for nothing. The schema is one of `get_json_schema`, which has few keys."""
    if value is None and schema.get("nullable"):
        return ""
    if "anyOf" in schema:
        wrong = [_wrong(value, each, place) for each in schema["anyOf"]]
        return "" if not all(wrong) else wrong[0]
    types = schema.get("type", list(_TYPES))
    types = [types] if isinstance(types, str) else types
    if not any(isinstance(value, _TYPES.get(each, (object,))) and _is_bool(value, each) for each in types):
        return f"{place} must be of type {' or '.join(types)}, not {_type_of(value)}: {_shown(value)}."
    if "enum" in schema and not any(value == each and type(value) is type(each) for each in schema["enum"]):
        return f"{place} must be one of {', '.join(map(json.dumps, schema['enum']))}, not {_shown(value)}."
    inner: list[tuple[Any, Any, str]] = []
    if isinstance(value, list):
        shape = schema.get("prefixItems")
        if shape is not None and len(value) != len(shape):
            return f"{place} must have {len(shape)} items, not {len(value)}."
        items = shape or [schema.get("items", {})] * len(value)
        inner = [(each, item, f"{place}[{i}]") for i, (each, item) in enumerate(zip(value, items, strict=True))]
    if isinstance(value, dict):
        inner = [(each, schema.get("additionalProperties", {}), f"{place}.{name}") for name, each in value.items()]
    return next(filter(None, (_wrong(each, of, where) for each, of, where in inner if of)), "")


def _is_bool(value: Any, name: str) -> bool:
    return not isinstance(value, bool) or name == "boolean" or name not in _TYPES


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, types in _TYPES.items() if isinstance(value, types) and name != "number"), "number")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
