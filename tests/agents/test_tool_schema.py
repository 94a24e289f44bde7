"""The schema of a tool is that of transformers, without the config's arguments; calls are checked against it."""

import re
from typing import Literal

import pytest
from transformers.utils import get_json_schema

from hwgrpo.agents.tool_schema import MalformedCall, make_schema, typed_arguments
from hwgrpo.errors import ConfigError

KEY = "rollout.agent.tools.2"


def weather(
    city: str,
    days: int = 1,
    unit: Literal["C", "F"] = "C",
    limit: float | None = None,
    tags: list[str] | None = None,
    at: tuple[float, float] = (0, 0),
    also: int | list[int] = 0,
    more: dict[str, int] | None = None,
    exact: bool = False,
) -> str:
    """Say the weather.

    Args:
        city: The city.
        days: How many days.
        unit: The unit.
        limit: A limit.
        tags: Some tags.
        at: A place.
        also: Numbers.
        more: Other numbers.
        exact: Whether it is exact.
    """
    raise AssertionError


SCHEMA = make_schema(weather, {}, KEY)


def test_the_schema_is_that_of_transformers():
    theirs = get_json_schema(weather)["function"]
    del theirs["return"]
    assert SCHEMA["function"] == theirs
    assert SCHEMA["type"] == "function"


def test_arguments_of_the_config_are_not_in_the_schema_and_need_no_hint():
    def lookup(key: str, table, *, retries=3, **options) -> str:
        """Look up.

        Args:
            key: The key.
        """
        raise AssertionError

    parameters = make_schema(lookup, {"table": "a.db", "retries": 1, "other": 2}, KEY)["function"]["parameters"]
    assert list(parameters["properties"]) == parameters["required"] == ["key"]


def no_docstring(a: int): ...


def no_hint(a):
    """Do.

    Args:
        a: A value.
    """


def no_line(a: int, b: int):
    """Do.

    Args:
        a: A value.
    """


def by_position(a: int, /):
    """Do.

    Args:
        a: A value.
    """


def hint_without_meaning(a: "Undefined"):  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
    """Do.

    Args:
        a: A value.
    """


@pytest.mark.parametrize(
    ("function", "kwargs", "reason"),
    [
        (no_docstring, {}, "no docstring.*give each argument a type hint, and a line in the docstring's Args"),
        (no_hint, {}, "missing a type hint.*or set rollout.agent.tools.2.kwargs.a"),
        (no_line, {}, "no description for the argument 'b'"),
        (by_position, {}, "positional-only argument 'a'"),
        (hint_without_meaning, {}, "'Undefined' is not defined"),
        (weather, {"unti": "C"}, "did you mean 'unit'"),
    ],
)
def test_a_function_without_a_schema_is_refused_with_the_setting_and_the_remedy(function, kwargs, reason):
    with pytest.raises(ConfigError, match=rf"(?is)^{re.escape(KEY)}\.(name|kwargs): .*{reason}"):
        make_schema(function, kwargs, KEY)


GOOD = [
    {"city": "Rome"},
    {"city": "Rome", "days": 2, "unit": "F", "limit": 2, "tags": ["a"], "at": [1, 2.5], "also": [1], "exact": True},
    {"city": "", "limit": None, "tags": None, "also": 3, "more": {"a": 1}},
]
BAD = [
    ({}, "needs the parameter 'city'"),
    ({"city": "Rome", "dayz": 1}, "no parameter 'dayz'; it has: city, days.*Did you mean 'days'"),
    ({"city": 3}, "city must be of type string, not integer: 3"),
    ({"city": None}, "city must be of type string, not null"),
    ({"city": "Rome", "days": "2"}, 'days must be of type integer, not string: "2"'),
    ({"city": "Rome", "days": 2.0}, "days must be of type integer, not number"),
    ({"city": "Rome", "days": True}, "days must be of type integer, not boolean"),
    ({"city": "Rome", "exact": 1}, "exact must be of type boolean, not integer"),
    ({"city": "Rome", "unit": "K"}, 'unit must be one of "C", "F", not "K"'),
    ({"city": "Rome", "tags": ["a", 1]}, r"tags\[1\] must be of type string"),
    ({"city": "Rome", "tags": "a"}, "tags must be of type array, not string"),
    ({"city": "Rome", "at": [1]}, "at must have 2 items, not 1"),
    ({"city": "Rome", "at": [1, "b"]}, r"at\[1\] must be of type number"),
    ({"city": "Rome", "also": "x"}, "also must be of type integer"),
    ({"city": "Rome", "more": {"a": "b"}}, "more.a must be of type integer"),
    ({"city": ["x" * 500]}, "city must be of type string, not array: .{60}[.]{3}"),
]


@pytest.mark.parametrize("arguments", GOOD)
def test_arguments_of_the_schema_pass_unchanged(arguments):
    assert typed_arguments(SCHEMA, arguments) == arguments


@pytest.mark.parametrize(("arguments", "reason"), BAD)
def test_other_arguments_are_refused_with_what_is_wrong(arguments, reason):
    with pytest.raises(MalformedCall, match=reason):
        typed_arguments(SCHEMA, arguments)
