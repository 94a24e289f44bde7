"""The process of a row's asserts. It calls the program's functions in the program's process, and receives data.

The program never runs here and never sees an assert or an expected value. What it returns arrives as data of built-in
types, compared by their own `==`; an object of another class arrives as a `Remote`, which equals no data. Operators
that would show the program an expected value (`+`, `<`, `in`, `==` with data) are not forwarded to it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from types import ModuleType
from typing import Any, NoReturn

from hwgrpo.rewards.sandbox.plain_values import decode, encode, receive, send

VERDICTS, REQUESTS, REPLIES = 3, 4, 5
"""File descriptors: to the worker, to and from the program's process."""
TOLERANCE = 1e-6
"""Relative and absolute difference of equal floats, in cases of arguments and results."""


class ProgramEnded(BaseException):
    """The program's process ended, or sent something else than data."""


class Program:
    """The connection to the program's process."""

    def __init__(self) -> None:
        self.ended = False
        self.names = frozenset(each for each in self._receive() if isinstance(each, str))

    def get(self, name: str) -> Any:
        """Return a global of the program; raise NameError where it has none."""
        if name not in self.names:
            raise NameError(f"name {name!r} is not defined")
        return self.ask("name", None, name=name)

    def ask(self, do: str, number: int | None, *arguments: Any, **request: Any) -> Any:
        """Make a request; return the value, or raise the built-in exception that is nearest to the program's.

        Lists, dicts and sets among the arguments are changed as the program changed them.
        """
        packed = [encode(each, _number_of) for each in arguments]
        named = {name: encode(each, _number_of) for name, each in request.pop("named", {}).items()}
        try:
            send(REQUESTS, {"do": do, "of": number, "arguments": packed, "named": named, **request})
        except OSError:
            self._end()
        reply = self._receive()
        try:
            if "raised" in reply:
                raise _exception(reply["raised"], str(reply.get("text")))
            for mine, changed in zip(arguments, reply["arguments"], strict=True):
                if changed is not None:
                    _update(mine, decode(changed, self._resolve))
            return decode(reply["value"], self._resolve)
        except (ValueError, KeyError, TypeError, AttributeError):
            if isinstance(reply, dict) and "raised" in reply:
                raise
            self._end()

    def _resolve(self, number: Any) -> Remote:
        if type(number) is not int:
            raise ValueError("no number of an object")
        return Remote(self, number)

    def _receive(self) -> Any:
        if not self.ended:
            with contextlib.suppress(EOFError, ValueError, RecursionError, OSError):
                return receive(REPLIES)
        return self._end()

    def _end(self) -> NoReturn:
        self.ended = True
        raise ProgramEnded


class Remote:
    """An object of the program that is no data: a function, a class, an instance."""

    def __init__(self, program: Program, number: int) -> None:
        self.__dict__ |= {"_program": program, "_number": number}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program.ask("call", self._number, *arguments, named=named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.ask("attribute", self._number, name=name)

    def __len__(self) -> int:
        return self._program.ask("len", self._number)

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return self._program.ask("item", self._number, key)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._program.ask("iter", self._number)
        if not isinstance(iterator, Remote):
            raise TypeError("its iterator is no object")
        while True:
            try:
                value = self._program.ask("next", iterator._number)
            except StopIteration:
                return
            yield value

    def __str__(self) -> str:
        text = self._program.ask("text", self._number)
        return text if isinstance(text, str) else object.__repr__(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._program.ask("equal", self._number, other) is True

    def __hash__(self) -> int:
        return hash(self._number)


class _Names(dict[str, Any]):
    """Globals of the tests: built-ins and standard modules are the tests' own, other names the program's.

    Args:
        program: where other names are.
        modules: names of which the tests use attributes; a program cannot replace a standard module by its own.
    """

    def __init__(self, program: Program, modules: Set[str]) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self.program, self.modules = program, modules

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in self.modules and name in sys.stdlib_module_names:
            self[name] = importlib.import_module(name)
            return self[name]
        if name not in self.program.names:
            raise KeyError(name)
        return self.program.get(name)


class _Solution(ModuleType):
    """The module `solution`, from which tests may import the program's names."""

    def __init__(self, program: Program) -> None:
        super().__init__("solution")
        self._program = program

    def __getattr__(self, name: str) -> Any:
        if name == "__all__" or name not in self._program.names:
            raise AttributeError(name)
        return self._program.get(name)


def run_tests() -> NoReturn:
    """Run the tests that standard input has, report each to the worker, and exit.

    They are JSON: {"setup": source, "asserts": sources}, or {"function": name, "cases": [arguments, expected] each}.
    """
    tests = json.loads(sys.stdin.buffer.read())
    try:
        program = Program()
    except ProgramEnded:
        _report({"outcome": "ended"})
        os._exit(0)
    for test in _cases(tests, program) if "function" in tests else _asserts(tests, program):
        _report(test)
        if program.ended:
            break
    os._exit(0)


def _report(result: Mapping[str, Any]) -> None:
    send(VERDICTS, result)


def _asserts(tests: Mapping[str, Any], program: Program) -> Iterator[dict[str, Any]]:
    names = _Names(program, _attributed("\n".join([tests["setup"], *tests["asserts"]])))
    sys.modules["solution"] = _Solution(program)
    setup = _attempt(program, lambda: exec(compile(tests["setup"], "setup", "exec", dont_inherit=True), names))
    if setup["outcome"] != "passed":
        yield setup
        return
    for source in tests["asserts"]:
        yield _attempt(program, lambda text=source: exec(compile(text, "test", "exec", dont_inherit=True), names))


def _attributed(source: str) -> Set[str]:
    """Return the names of which a source uses attributes."""
    with contextlib.suppress(SyntaxError, ValueError):
        nodes = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
        return {node.id for node in nodes if isinstance(node, ast.Name)}
    return sys.stdlib_module_names


def _cases(tests: Mapping[str, Any], program: Program) -> Iterator[dict[str, Any]]:
    for arguments, expected in tests["cases"]:

        def compare(arguments: Any = arguments, expected: Any = expected) -> None:
            if tests["function"] in program.names:
                function = program.get(tests["function"])
            else:
                function = getattr(program.get("Solution")(), tests["function"])
            result = function(*arguments)
            alone = [expected[0]] if isinstance(expected, list) and len(expected) == 1 else []
            if not any(_same(result, each) for each in (expected, *alone)):
                raise AssertionError

        yield _attempt(program, compare)


def _attempt(program: Program, call: Any) -> dict[str, Any]:
    """Run one test; return its outcome: passed, failed, error, memory, or ended with the program."""
    try:
        call()
    except ProgramEnded:
        return {"outcome": "ended"}
    except AssertionError as error:
        return {"outcome": "failed", "detail": _line(error)}
    except MemoryError:
        return {"outcome": "memory"}
    except BaseException as error:
        return {"outcome": "ended"} if program.ended else {"outcome": "error", "detail": _line(error)}
    return {"outcome": "ended"} if program.ended else {"outcome": "passed"}


def _line(error: BaseException) -> str:
    with contextlib.suppress(BaseException):
        return f"{type(error).__name__}: {error}"[:200]
    return type(error).__name__


def _same(result: Any, expected: Any) -> bool:
    """Return whether a result is the expected one, which JSON may have turned from tuples to lists."""
    if isinstance(result, float) or isinstance(expected, float):
        numbers = all(isinstance(each, int | float) for each in (result, expected))
        return numbers and (result == expected or math.isclose(result, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE))
    if isinstance(expected, list):
        listed = isinstance(result, list | tuple) and len(result) == len(expected)
        return listed and all(map(_same, result, expected))
    if isinstance(expected, dict) and isinstance(result, dict):
        texts: Sequence[Any] = [str(key) for key in result]
        return sorted(texts) == sorted(map(str, expected)) and all(
            _same(value, expected.get(key, expected.get(str(key)))) for key, value in result.items()
        )
    return type(result) is type(expected) and bool(result == expected)


def _number_of(value: Any) -> int:
    if isinstance(value, Remote):
        return value._number
    raise TypeError(f"a test passes a {type(value).__name__} to the program, which is no data")


def _exception(names: Any, text: str) -> BaseException:
    """Return an exception of the first built-in class among the bases of the program's."""
    for name in names if isinstance(names, list) else ():
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(TypeError):
                return kind(text)
    return RuntimeError(text)


def _update(mine: Any, changed: Any) -> None:
    """Give a list, dict or set the content that the program left in its copy."""
    if isinstance(mine, list) and isinstance(changed, list):
        mine[:] = changed
    elif isinstance(mine, dict | set) and type(mine) is type(changed):
        mine.clear()
        mine.update(changed)
