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
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence, Set
from types import ModuleType
from typing import Any, NoReturn

from hwgrpo.sandbox import pytest_stand_in
from hwgrpo.sandbox.assertions import OWN_MODULES, Assertions, Function, names_read, walk
from hwgrpo.sandbox.called_tests import CalledTests, is_skip, without_main
from hwgrpo.sandbox.counted_assertions import Counter, compile_counted
from hwgrpo.sandbox.plain_values import decode, encode, receive, send
from hwgrpo.sandbox.program_process import seed_generators

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
        self.asked = 0
        """Number of requests."""
        self._one_at_a_time = threading.Lock()  # tests may have threads
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
        self.asked += 1
        packed = [encode(each, _number_of) for each in arguments]
        named = {name: encode(each, _number_of) for name, each in request.pop("named", {}).items()}
        with self._one_at_a_time:
            try:
                send(REQUESTS, {"do": do, "of": number, "arguments": packed, "named": named, **request})
            except OSError:
                self._end()
            reply = self._receive()
        try:
            if "raised" in reply:
                error = _exception(reply["raised"], str(reply.get("text")))
                if do != "next" and isinstance(error, StopIteration | StopAsyncIteration):
                    error = RuntimeError(f"{type(error).__name__}: {error}")  # it would end loops of the test silently
                raise error
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
        self.__dict__.update(_program=program, _number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program.ask("call", self._number, *arguments, named=named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.ask("attribute", self._number, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.ask("set", self._number, value, name=name)

    def awaited(self) -> Coroutine[Any, Any, Any]:
        """Return a coroutine for one of the program's."""

        async def wait() -> Any:
            return self._program.ask("await", self._number)

        return wait()

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
        entry_points: names of the function under test, which are the program's whatever else they are.
    """

    def __init__(self, program: Program, modules: Set[str], entry_points: Set[str]) -> None:
        super().__init__(__builtins__=builtins)
        self.program, self.modules, self.entry_points = program, modules, entry_points

    def __missing__(self, name: str) -> Any:
        if name not in self.entry_points:
            if hasattr(builtins, name):
                raise KeyError(name)
            if name in self.modules and name in OWN_MODULES:
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

    They are JSON: {"setup": source, "asserts": tests} or {"function": name, "cases": [arguments, expected] each}.
    A test is source, or {"call": names of a function or of a class and its method, "argument": expression or None},
    with `source` to run before, and "smoke", whether it asserts nothing and passes where it does not raise. Further
    keys: `entry_point`, an expression whose names are the program's, also where they are those of built-in functions,
    and `main`, whether `__name__` is "__main__".
    """
    seed_generators()
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
    counter = Counter(lambda: program.asked > 0, lambda function: isinstance(function, Remote))
    threading.excepthook = lambda ended: counter.hide(ended.exc_value)
    prepared = _attempt(program, lambda: _prepare(tests, program, counter))
    if isinstance(prepared, dict):
        yield prepared
        return
    names, called, assertions = prepared
    last = len(tests["asserts"]) - 1
    for number, test in enumerate(tests["asserts"]):
        counter.reset()

        def run(number: int = number, test: Any = test) -> None:
            source = test if isinstance(test, str) else test.get("source")
            if source:
                exec(compile_counted(source, "test", assertions), names)
            if not isinstance(test, str):
                called.run(test["call"], test["argument"])
                counter.executed += test["smoke"]
            if number == last:
                called.end()

        result = _attempt(program, run) or {"outcome": "passed"}
        if result["outcome"] == "passed" and counter.hidden is not None:
            result = {"outcome": "failed", "detail": f"caught by the test: {_line(counter.hidden)}"}
        elif result["outcome"] == "passed" and not counter.executed:
            result = {"outcome": "no_assertion", "detail": "the test executed no assertion on the program"}
        yield result


def _prepare(tests: Mapping[str, Any], program: Program, counter: Counter) -> tuple[_Names, CalledTests, Assertions]:
    """Run the setup of tests; return their globals, what calls them, and their assertions."""
    sources = [
        tests["setup"],
        *(each if isinstance(each, str) else each.get("source", "") for each in tests["asserts"]),
    ]
    body = [statement for each in sources for statement in ast.parse(each).body]
    entry_point = tests.get("entry_point")
    own = _names_of(entry_point) if entry_point else frozenset()
    assertions = Assertions(body, own)
    nodes = [node for each in body for node in walk(each)]
    attributed = {
        each.value.id for each in nodes if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name)
    }
    names = _Names(program, attributed, own)
    names["__name__"] = "__main__" if tests.get("main") else "tests"
    names |= {**counter.names(), "exit": sys.exit, "quit": sys.exit}
    for name in _read_by_classes(nodes) & program.names & assertions.program:
        names.setdefault(name, program.get(name))  # a class body does not ask for missing names
    sys.modules["solution"], sys.modules["pytest"] = _Solution(program), pytest_stand_in
    if any((isinstance(each, ast.Name) and each.id == "unittest") or _imports(each, "unittest") for each in nodes):
        without_main()
    exec(compile_counted(tests["setup"], "setup", assertions), names)
    called = CalledTests(names, lambda text: eval(text, _Names(program, frozenset(), _names_of(text))))
    called.begin()
    if counter.hidden is not None:
        raise AssertionError(f"caught by the tests: {_line(counter.hidden)}")
    return names, called, assertions


def _names_of(expression: str) -> frozenset[str]:
    return names_read(ast.parse(expression, mode="eval"))


def _read_by_classes(nodes: Sequence[ast.AST]) -> Set[str]:
    """Return the names that the bodies of classes read, without those of their methods."""
    statements = [each for node in nodes if isinstance(node, ast.ClassDef) for each in node.body]
    functions = [each for each in statements if isinstance(each, Function)]
    read = [each for each in statements if not isinstance(each, Function)]
    read += [part for each in functions for part in (*each.decorator_list, *each.args.defaults)]
    return frozenset().union(*map(names_read, read))


def _imports(node: ast.AST, module: str) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == module
    return isinstance(node, ast.Import) and any(each.name == module for each in node.names)


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

        yield _attempt(program, compare) or {"outcome": "passed"}


def _attempt(program: Program, call: Callable[[], Any]) -> Any:
    """Call a function; return its value, or else the outcome: failed, error, memory, skipped, or ended."""
    try:
        value = call()
    except ProgramEnded:
        return {"outcome": "ended"}
    except BaseException as error:
        if program.ended:
            return {"outcome": "ended"}
        if isinstance(error, MemoryError):
            return {"outcome": "memory"}
        outcome = "failed" if isinstance(error, AssertionError) else "skipped" if is_skip(error) else "error"
        return {"outcome": outcome, "detail": _line(error)}
    return {"outcome": "ended"} if program.ended else value


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
