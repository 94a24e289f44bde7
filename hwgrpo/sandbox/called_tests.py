"""Tests that are functions and methods, called as unittest and pytest call them, in the tests' process."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from hwgrpo.sandbox.pytest_stand_in import MARKS, Fixture, Skipped, cases, marks_of, require_wanted


def is_skip(error: BaseException) -> bool:
    """Return whether an exception ends a test as skipped."""
    unittest = sys.modules.get("unittest")
    return isinstance(error, Skipped) or (unittest is not None and isinstance(error, unittest.SkipTest))


def without_main() -> None:
    """Keep `unittest.main()` from running tests and exiting."""
    unittest: Any = importlib.import_module("unittest")
    unittest.main = unittest.TestProgram = lambda *_, **__: None


class CalledTests:
    """The tests of a module that are called.

    Args:
        names: the module's globals.
        evaluate: returns the value of an expression of the program's names.
    """

    def __init__(self, names: dict[str, Any], evaluate: Callable[[str], Any]) -> None:
        self._names, self._evaluate = names, evaluate
        self._of_module, self._of_class = ExitStack(), ExitStack()
        self._class: Any = None
        self._shared: dict[tuple[str, Any], Any] = {}
        """Values of fixtures that live longer than a test."""

    def begin(self) -> None:
        """Make the module's own preparations."""
        for before, after in (("setUpModule", "tearDownModule"), ("setup_module", "teardown_module")):
            self._call_around(self._of_module, self._own(before), self._own(after), _Module(self._names))

    def end(self) -> None:
        """Undo the preparations of the last class and of the module."""
        self._leave_class()
        self._of_module.close()

    def run(self, path: Sequence[str], argument: str | None) -> None:
        """Run a test.

        Args:
            path: names of a function, or of classes and a method.
            argument: expression for its first argument; None: it has none but fixtures.

        Raises:
            Exception: it failed, or was skipped.
        """
        owner, target = None, self._names[path[0]]
        for name in path[1:]:
            owner, target = target, getattr(target, name)
        if owner is not self._class:
            self._enter_class(owner)
        given = [self._evaluate(argument)] if argument else []
        unittest = sys.modules.get("unittest")
        if owner is not None and unittest is not None and issubclass(owner, unittest.TestCase):
            outcome = _Outcome()
            owner(path[-1]).run(outcome)
            outcome.raise_first()
            return
        marks = [*self._marks_around(owner), *marks_of(target)]
        require_wanted(marks)
        for case in cases(marks):
            with ExitStack() as stack:
                test = target if owner is None else getattr(owner(), path[-1])
                instance = getattr(test, "__self__", None)
                values = self._fixtures(instance, test, case, stack, len(given), marks)
                for before, after in (("setup_method", "teardown_method"), ("setup", "teardown")):
                    self._call_around(stack, getattr(instance, before, None), getattr(instance, after, None), test)
                if owner is None:
                    self._call_around(stack, self._own("setup_function"), self._own("teardown_function"), test)
                finish(test(*given, **values))

    def _own(self, name: str) -> Any:
        return self._names.get(name)  # what the tests define: unlike `[name]` it does not ask the program

    def _call_around(self, stack: ExitStack, before: Any, after: Any, *argument: Any) -> None:
        """Call a function, with an argument where it has a parameter, and another one when the stack is closed."""
        if callable(before):
            before(*argument[: len(inspect.signature(before).parameters)])
        if callable(after):
            stack.callback(after, *argument[: len(inspect.signature(after).parameters)])

    def _enter_class(self, owner: Any) -> None:
        self._leave_class()
        if owner is None or getattr(owner, "__unittest_skip__", False):
            return
        if hasattr(owner, "doClassCleanups"):
            self._of_class.callback(owner.doClassCleanups)
        for before, after in (("setUpClass", "tearDownClass"), ("setup_class", "teardown_class")):
            self._call_around(self._of_class, getattr(owner, before, None), getattr(owner, after, None), owner)
        self._class = owner

    def _leave_class(self) -> None:
        stack, self._of_class, self._class = self._of_class, ExitStack(), None
        self._shared = {key: value for key, value in self._shared.items() if key[1] is None}
        stack.close()

    def _marks_around(self, owner: Any) -> list[Any]:
        marks = self._own(MARKS) or []
        around = list(marks) if isinstance(marks, list | tuple) else [marks]
        return around + [mark for each in (owner.__mro__ if owner is not None else ()) for mark in marks_of(each)]

    def _fixtures(
        self, instance: Any, test: Any, case: Mapping[str, Any], stack: ExitStack, given: int, marks: Sequence[Any]
    ) -> dict[str, Any]:
        values: dict[str, Any] = {}
        used = [name for mark in marks if mark.name == "usefixtures" for name in mark.args]
        used += [each.name for each in self._all_fixtures(instance) if each.autouse]
        for name in dict.fromkeys(used):
            self._value(name, instance, case, stack, values)
        known = {*case, *(each.name for each in self._all_fixtures(instance))}
        wanted = [name for name in list(inspect.signature(test).parameters)[given:] if name in known]
        return {name: self._value(name, instance, case, stack, values) for name in wanted}

    def _all_fixtures(self, instance: Any) -> list[Fixture]:
        """Return the fixtures of a test, those of its class before those of the module."""
        classes = type(instance).__mro__ if instance is not None else ()
        found = [each for one in (*map(vars, classes), self._names) for each in one.values()]
        return [each for each in found if isinstance(each, Fixture)]

    def _value(
        self, name: str, instance: Any, case: Mapping[str, Any], stack: ExitStack, values: dict[str, Any]
    ) -> Any:
        """Return the value of an argument: of the case, or of a fixture, which is called once per its scope."""
        if name in case:
            return case[name]
        if name in values:
            return values[name]
        fixture = next((each for each in self._all_fixtures(instance) if each.name == name), None)
        if fixture is None:
            raise TypeError(f"there is no fixture {name!r}")
        shared = fixture.scope != "function"
        key = (name, self._class if fixture.scope == "class" else None)
        if shared and key in self._shared:
            return self._shared[key]
        in_class = instance is not None and any(fixture in vars(each).values() for each in type(instance).__mro__)
        bound = [instance] if in_class else []
        names = list(inspect.signature(fixture.function).parameters)[len(bound) :]
        arguments = {each: self._value(each, instance, case, stack, values) for each in names}
        ends = self._of_class if fixture.scope == "class" else self._of_module if shared else stack
        values[name] = _made(fixture.function(*bound, **arguments), ends)
        if shared:
            self._shared[key] = values[name]
        return values[name]


class _Module:
    """The tests' module, as `setup_module` gets it."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


class _Outcome:
    """The result that a `unittest.TestCase` reports to."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []

    def raise_first(self) -> None:
        """Raise what ended the test, if anything did: a failure before a skip."""
        for error in sorted(self._errors, key=is_skip):
            raise error

    def addError(self, test: Any, error: Any) -> None:
        self._errors.append(error[1])

    addFailure = addError
    addExpectedFailure = addError

    def addSubTest(self, test: Any, subtest: Any, error: Any) -> None:
        if error is not None:
            self._errors.append(error[1])

    def addSkip(self, test: Any, reason: str) -> None:
        self._errors.append(Skipped(reason))

    def addUnexpectedSuccess(self, test: Any) -> None:
        self._errors.append(Skipped("it was expected to fail"))

    def addSuccess(self, test: Any) -> None:
        """Do nothing."""

    def addDuration(self, test: Any, seconds: float) -> None:
        """Do nothing."""

    startTest = stopTest = addSuccess


def finish(value: Any) -> None:
    """Run what a test returned: a coroutine, or a generator, which may yield functions with arguments."""
    if inspect.iscoroutine(value):
        importlib.import_module("asyncio").run(value)
    elif inspect.isgenerator(value):
        for each in value:
            call, *arguments = each if isinstance(each, tuple) and each else (each,)
            if callable(call):
                finish(call(*arguments))


def _made(value: Any, ends: ExitStack) -> Any:
    """Return what a fixture made; one that yields it goes on at the end."""
    if inspect.iscoroutine(value):
        return importlib.import_module("asyncio").run(value)
    if inspect.isgenerator(value):
        made = next(value)
        ends.callback(next, value, None)
        return made
    return value
