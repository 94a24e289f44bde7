"""Programs in responses, unit tests in data rows, and the comparison of outputs.

Accepted tests, each also as JSON text:
    {"inputs": [...], "outputs": [...]}                  standard input and output (verl, PRIME)
    {"inputs": [...], "outputs": [...], "fn_name": "f"}  arguments and results of a function or a `Solution` method
    ["assert f(1) == 2", ...]                            asserts (MBPP's test_list)
    "def check(candidate): ..." with an entry point      a test function (HumanEval)
    "class TestF(unittest.TestCase): ..."                source of tests, of unittest's or pytest's kind (BigCodeBench)
    "assert f(1) == 2"                                   source that is one test
    {"test": ..., "entry_point": ..., "test_list": ...}  the columns of a row in one value
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hwgrpo.errors import DataError, quoted
from hwgrpo.sandbox.fenced_blocks import code_blocks
from hwgrpo.sandbox.tests_in_source import read_sources

LANGUAGES = ("", "python", "python3", "py", "py3")
TOLERANCE = 1e-6
"""Relative and absolute difference of equal numbers with a decimal point, in outputs."""
SETUP_COLUMNS = ("test_imports", "test_setup_code")


@dataclass(frozen=True)
class UnitTests:
    """The tests of a data row."""

    request: Mapping[str, Any]
    """Part of a job of `SandboxPool`: `inputs`, or `tests`."""
    outputs: tuple[str, ...]
    """The expected outputs, one per input; they stay in the trainer."""
    count: int
    """Number of tests."""


def extract_program(response: str) -> str | None:
    """Return the last fenced block of Python in a response; None without one."""
    blocks = [body for language, body in code_blocks(response) if language.lower() in LANGUAGES]
    return blocks[-1] if blocks else None


def read_tests(value: Any, columns: Mapping[str, Any], entry_point_key: str = "entry_point") -> UnitTests:
    """Read the tests of a row.

    Args:
        value: the tests, in one of the forms above.
        columns: the row, for the entry point and MBPP's imports.
        entry_point_key: column with the name of the function that `check` is called with.

    Raises:
        DataError: the value is none of the forms above, or has no tests, or one that could prove nothing.
    """
    value = _parsed(value)
    if isinstance(value, Mapping) and not {"inputs", "outputs"} <= set(value):
        columns = {**columns, **value}
        value = _parsed(next((value[name] for name in ("test_list", "test", "tests") if value.get(name)), None))
    if isinstance(value, Mapping):
        tests = _input_output(value)
    elif isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, str) for each in value):
        tests = _sources(tuple(value), columns, entry_point_key)
    elif isinstance(value, str) and value.strip():
        tests = _sources((value,), columns, entry_point_key)
    else:
        raise DataError(f"{quoted(value)} is no tests; {_ACCEPTED}")
    if not tests.count:
        raise DataError(f"{quoted(value)} has no tests; {_ACCEPTED}")
    return tests


_ACCEPTED = (
    'accepted are {"inputs": [...], "outputs": [...]}, with "fn_name" for a function, a list of asserts, or the source '
    "of tests, with an entry point where they define check(candidate)"
)


def same_output(output: str, expected: str) -> bool:
    """Return whether two outputs are equal, but for white space and the last digits of numbers with a decimal point."""
    lines, wanted = (text.strip().splitlines() for text in (output, expected))
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(line: str, expected: str) -> bool:
    tokens, wanted = line.split(), expected.split()
    return len(tokens) == len(wanted) and all(map(_same_token, tokens, wanted))


def _same_token(token: str, expected: str) -> bool:
    if token == expected:
        return True
    if "." not in expected or max(len(token), len(expected)) > 400:
        return False
    try:
        return math.isclose(float(token), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False


def _parsed(value: Any) -> Any:
    """Return JSON text as its value; other values as they are."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return the list of a data frame's array; other values as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def _input_output(value: Mapping[str, Any]) -> UnitTests:
    inputs, outputs = list(value["inputs"]), list(value["outputs"])
    if len(inputs) != len(outputs):
        raise DataError(f"tests have {len(inputs)} inputs and {len(outputs)} outputs")
    if not value.get("fn_name"):
        texts = ["\n".join(map(str, each)) if isinstance(each, list) else str(each) for each in inputs]
        wanted = ["\n".join(map(str, each)) if isinstance(each, list) else str(each) for each in outputs]
        if wanted and not any(map(str.split, wanted)):
            raise DataError("all outputs of the tests are empty: a program that does nothing would pass them")
        return UnitTests({"inputs": texts}, tuple(wanted), len(texts))
    cases = [[_arguments(each), _literal(result)] for each, result in zip(inputs, outputs, strict=True)]
    return UnitTests({"tests": {"function": str(value["fn_name"]).split(".")[-1], "cases": cases}}, (), len(cases))


def _arguments(value: Any) -> list[Any]:
    """Return the arguments of a call: a list of them, or text with one per line."""
    if isinstance(value, str):
        return [_literal(line) for line in value.splitlines() if line.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def _literal(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            read_value = read(value)
            json.dumps(read_value)
            return read_value
        except (ValueError, SyntaxError, TypeError, RecursionError):
            continue
    return value


def _setup(columns: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for name in SETUP_COLUMNS:
        value = _plain(columns.get(name))
        lines += [value] if isinstance(value, str) else map(str, value or ())
    return "\n".join(lines)


def _sources(sources: tuple[str, ...], columns: Mapping[str, Any], entry_point_key: str) -> UnitTests:
    entry_point = str(columns.get(entry_point_key) or "").strip() or None
    if not sources:
        return UnitTests({}, (), 0)
    request = read_sources(sources, _setup(columns), entry_point)
    return UnitTests({"tests": request}, (), len(request["asserts"]))
