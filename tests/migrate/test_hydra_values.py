"""Hydra's overrides, values and interpolations."""

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.hydra_values import Override, parse_override, read_resolved, resolve
from hwgrpo.migrate.imports.variable_text import known


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1e-6", 1e-6),
        ("-0.5", -0.5),
        ("1.", 1.0),
        ("True", True),
        ("false", False),
        ("null", None),
        ("None", "None"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("'007'", "007"),
        ('"a b"', "a b"),
        ("", ""),
        ("[console,wandb]", ["console", "wandb"]),
        ("['a', \"b\"]", ["a", "b"]),
        ("[1,2.5,null,[x]]", [1, 2.5, None, ["x"]]),
        ("[]", []),
        ("{a: 1, b: {c: [x]}}", {"a": 1, "b": {"c": ["x"]}}),
        ("${a.b}/c", "${a.b}/c"),
        ("['${a.b}',${c.d}]", ["${a.b}", "${c.d}"]),
        ("${oc.env:A,b}/c", "${oc.env:A,b}/c"),
        ("'a,b'", "a,b"),
    ],
)
def test_a_value_is_what_hydra_reads(text: str, value: object):
    found = parse_override(f"k.l={text}").value
    assert found == value
    assert type(found) is type(value)


def test_the_forms_of_an_override():
    assert parse_override("a.b=1") == parse_override("++a.b=1") == Override("a.b", 1)
    assert parse_override("+a.b=1") == Override("a.b", 1, adds=True)
    assert parse_override("~a.b") == Override("a.b", None, deletes=True)
    for wrong in ("a.b", "=1", "a.b=[1", "a.b='x", "a.b={x}"):
        with pytest.raises(ConfigError):
            parse_override(wrong)


@pytest.mark.parametrize("text", ["a,b", "1,2", "'a','b'", "[a],[b]", "${oc.env:A,b},c"])
def test_a_sweep_is_an_error_that_names_the_list(text: str):
    with pytest.raises(ConfigError) as error:
        parse_override(f"data.train_files={text}")
    assert f"a list is data.train_files=[{text}]" in str(error.value)


def test_interpolations_are_resolved():
    settings = {
        "a.b": "x",
        "a.c": "${a.b}/${.b}",
        "a.d": "${oc.env:E,7}",
        "a.e": "${oc.env:F}",
        "a.f": "${oc.select:q,3}",
    }
    found = resolve({**settings, "a.g": "${d.e}"}, {"d.e": 5}, {"F": "f"})
    assert found == {"a.b": "x", "a.c": "x/x", "a.d": 7, "a.e": "${oc.env:F}", "a.f": 3, "a.g": 5}
    assert known(found["a.e"]) == "f"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${a.c}", "refers to itself"),
        ("${oc.env:N}", "N is not set"),
        ("${n.n}", "n.n is not set"),
        ("${x:1}", "resolver x"),
    ],
)
def test_an_interpolation_of_nothing_is_an_error(value: str, message: str):
    with pytest.raises(ConfigError, match=message):
        resolve({"a.c": value}, {}, {})


def test_a_resolved_file_is_flat():
    text = "a:\n  _target_: x.Y\n  b: 1\n  c: {}\nd: [1]\n"
    assert read_resolved(text, "config.yaml") == {"a.b": 1, "a.c": {}, "d": [1]}
