"""The tests that source has, read without running it, and the reasons for which they could prove nothing.

A test is a function `test*`, a method `test*` of a `unittest.TestCase` or of a class `Test*` (pytest), HumanEval's
`check(candidate)`, or, where there is none of them, the source itself.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hwgrpo.errors import DataError, escaped, quoted
from hwgrpo.sandbox import pytest_stand_in
from hwgrpo.sandbox.assertions import (
    NOTHING,
    OWN_MODULES,
    Assertions,
    Definition,
    Function,
    Reached,
    asks_for_main,
    bodies_of,
    called,
    children,
    dotted,
    is_broad,
    names_read,
    parameters_of,
    walk,
)

CASES = ("TestCase", "IsolatedAsyncioTestCase")
NOT_RUN = ("skip", "xfail", "expectedFailure")
"""Decorators of tests that neither pass nor fail."""
AROUND_TESTS = (
    *("setUp", "asyncSetUp", "tearDown", "asyncTearDown", "setup_method", "teardown_method", "setup", "teardown"),
)
"""Methods that run with every test of a class."""
CHECK, CANDIDATE = "check", "candidate"
OTHER_PROCESS = "the program runs in another process than its tests"
INVISIBLE = f"tests cannot see what the program prints, logs or warns of: {OTHER_PROCESS}"
MOCK = f"it replaces objects in the process of the tests, and {OTHER_PROCESS}"
MOCKS = "unittest.mock"
UNSEEN = (*("assertWarns", "assertWarnsRegex", "assertLogs", "assertNoLogs", "redirect_stdout", "redirect_stderr"),)
CAPTURED = ("sys.stdout", "sys.stderr")
"""Variables that tests set to read what was printed."""
PYTEST = "the sandbox has no pytest; what stands in for it has {}".format(", ".join(pytest_stand_in.__all__))
REMEDY = "mend the row's tests or leave the row out"


@dataclass(frozen=True)
class _Found:
    """A function or method that is a test."""

    path: tuple[str, ...]
    """Its name, after those of its classes."""
    function: Function
    in_class: bool
    classes: tuple[ast.ClassDef, ...] = ()
    """Its class, and those that this inherits from."""
    case: bool = False
    """Whether it is one of unittest's."""
    guarded: bool = False
    """Whether it is defined below `if __name__ == "__main__":`."""


@functools.lru_cache(maxsize=1 << 12)
def read_sources(sources: tuple[str, ...], setup: str, entry_point: str | None) -> Mapping[str, Any]:
    """Return the tests of a row, as `tests_process.run_tests` runs them.

    Args:
        sources: of a test module, or several of tests.
        setup: source that runs before them.
        entry_point: expression for the program's function, `f` or `Solution().f`.

    Raises:
        DataError: they are no Python; one of them could execute no assertion on the program's names, or needs what the
            sandbox does not have.
    """
    try:
        return _Reader(sources, setup, entry_point).request()
    except RecursionError as error:
        raise DataError(f"the tests are nested too deeply to be read; {REMEDY}") from error


class _Reader:
    def __init__(self, sources: Sequence[str], setup: str, entry_point: str | None) -> None:
        self._sources, self._setup, self._entry_point = sources, setup, entry_point
        self._bodies = [_parse(each, "the tests are") for each in sources]
        entry = _parse(f"({entry_point})", f"the entry point {quoted(entry_point)} is") if entry_point else []
        self._all = [*_parse(setup, "the tests' setup is"), *(each for body in self._bodies for each in body)]
        self._nodes = [node for each in self._all for node in walk(each)]
        self._classes = {each.name: each for each in self._nodes if isinstance(each, ast.ClassDef)}
        candidates = (each.arg for each in self._nodes if isinstance(each, ast.arg))
        functions = (each.name for each in self._nodes if isinstance(each, Function))
        self._named = None if CHECK in functions or CANDIDATE in candidates else entry_point
        own = names_read(entry[0]) if self._named else NOTHING
        self._assertions = Assertions(self._all, own)
        self._aliases = {
            alias.asname: alias.name.rpartition(".")[2]
            for each in self._nodes
            if isinstance(each, ast.Import | ast.ImportFrom)
            for alias in each.names
            if alias.asname
        }
        functions = [each for each in self._nodes if isinstance(each, Function)]
        self._fixtures = {_fixture_name(each): each for each in functions if self._decorated(each, ("fixture",))}

    def request(self) -> dict[str, Any]:
        self._refuse_unsupported()
        setup, before = [self._setup], ""
        tests: list[Any] = []
        main, without = False, None
        for number, (source, body) in enumerate(zip(self._sources, self._bodies, strict=True)):
            where = f"test {number + 1} of {len(self._sources)}" if len(self._sources) > 1 else "the tests"
            found = [each for each in self._tests_in(body) if not self._is_helper(each)]
            found = list({each.path: each for each in found}.values())
            main |= any(each.guarded for each in found) or not found
            if found:
                self._refuse_without_effect(where, self._assertions.reached([(body, NOTHING)]).without_effect)
            for each in found:
                self._require_arguments(each)
                without = without or self._without_assertion(each)
            if found and len(self._sources) == 1:
                setup.append(source)
                tests += map(self._call, found)
            elif found:
                calls = list(map(self._call, found))
                tests += [{"source": f"{before}{source}", **calls[0]}, *calls[1:]]
                before = ""
            elif self._has_assertion(body, where):
                tests.append(f"{before}{source}")
                before = ""
            else:
                before += f"{source}\n"  # a part of the next one, e.g. its imports
        if not tests:
            raise DataError(self._why_none())
        if without and all(isinstance(each, dict) and each["smoke"] for each in tests):
            raise without
        return {"setup": "\n".join(setup), "asserts": tests, "entry_point": self._named, "main": main}

    def _call(self, found: _Found) -> dict[str, Any]:
        takes = _required(found)
        given = _positional(found) if found.path == (CHECK,) else takes == [CANDIDATE]
        smoke = not self._reached(found).assertions
        return {"call": list(found.path), "argument": self._entry_point if given else None, "smoke": smoke}

    def _tests_in(self, body: Sequence[ast.stmt], guarded: bool = False) -> Iterator[_Found]:
        """Yield the functions and methods that are tests by their names, in the order of the source."""
        for statement in body:
            if isinstance(statement, ast.If):
                below = guarded or asks_for_main(statement)
                if not (isinstance(statement.test, ast.Constant) and not statement.test.value):
                    yield from self._tests_in(statement.body, below)
                yield from self._tests_in(statement.orelse, guarded)
            elif isinstance(statement, ast.Try):
                yield from self._tests_in([*statement.body, *statement.orelse], guarded)
            elif isinstance(statement, Function) and not self._decorated(statement, NOT_RUN):
                check = statement.name == CHECK and self._entry_point and self._assertions.uses.get(CHECK, 0) == 0
                if (check or statement.name.startswith("test")) and statement not in self._fixtures.values():
                    yield _Found((statement.name,), statement, False, guarded=guarded)
            elif isinstance(statement, ast.ClassDef):
                yield from (replace(each, guarded=guarded) for each in self._tests_of_class(statement, ()))

    def _tests_of_class(self, definition: ast.ClassDef, outer: tuple[str, ...]) -> Iterator[_Found]:
        family = self._family(definition)
        case = any(self._alias(_last(base)) in CASES for each in family for base in each.bases)
        methods = {each.name: each for one in reversed(family) for each in one.body if isinstance(each, Function)}
        if not case and (not definition.name.startswith("Test") or "__init__" in methods):
            return
        if self._decorated(definition, NOT_RUN):
            return
        path = (*outer, definition.name)
        order = dict.fromkeys(each.name for one in family for each in one.body if isinstance(each, Function))
        tests = [name for name in order if name.startswith("test")]
        for name in tests or [name for name in order if case and name == "runTest"]:
            if not self._decorated(methods[name], NOT_RUN):
                yield _Found((*path, name), methods[name], True, tuple(family), case)
        for each in definition.body:
            if isinstance(each, ast.ClassDef) and not case:
                yield from self._tests_of_class(each, path)

    def _family(self, definition: ast.ClassDef) -> list[ast.ClassDef]:
        """Return a class and those of the source that it inherits from, the nearest first."""
        family = [definition]
        for each in family:
            family += [
                self._classes[name]
                for name in map(_last, each.bases)
                if name in self._classes and self._classes[name] not in family
            ]
        return family

    def _is_helper(self, found: _Found) -> bool:
        """Return whether other code calls it, with arguments that a test would not get, or because it has no test."""
        if found.in_class or self._assertions.uses.get(found.path[-1], 0) == 0:
            return False
        return bool(self._missing(found)) or not self._reached(found).assertions

    def _missing(self, found: _Found) -> list[str]:
        """Return the parameters that nothing gives."""
        given = {*self._fixtures, *self._parametrized(found)}
        missing = [name for name in _required(found) if name not in given and "*" not in given]
        if self._entry_point and missing == [CANDIDATE]:
            return []
        if self._entry_point and found.path == (CHECK,):
            first = _positional(found)[:1] or missing[:1]
            return [each for each in missing if each not in first]
        return missing

    def _parametrized(self, found: _Found) -> Iterator[str]:
        """Yield the names that `parametrize` gives; "*" where they are not written as a constant."""
        for owner in (found.function, *found.classes):
            for each in owner.decorator_list:
                if isinstance(each, ast.Call) and _last(each.func) == "parametrize":
                    names = [*each.args[:1], *(word.value for word in each.keywords if word.arg == "argnames")]
                    try:
                        value = ast.literal_eval(names[0])
                        yield from value.replace(",", " ").split() if isinstance(value, str) else map(str, value)
                    except (ValueError, IndexError, TypeError):
                        yield "*"

    def _require_arguments(self, found: _Found) -> None:
        if found.case:
            return
        wanted = [(found, each) for each in self._missing(found)]
        for fixture in self._fixtures.values():
            holder = _Found((fixture.name,), fixture, any(fixture in each.body for each in self._classes.values()))
            wanted += [(holder, each) for each in self._missing(holder)]
        for each, name in wanted:
            raise DataError(
                f"{'.'.join(each.path)} has the parameter {name!r}, given by no fixture or parametrize of the tests; "
                f"{PYTEST}, and none of pytest's own fixtures; {REMEDY}"
            )

    def _reached(self, found: _Found) -> Reached:
        around = [each for one in found.classes for each in one.body if isinstance(each, Function)]
        run = [found.function, *(each for each in around if each.name in AROUND_TESTS)]
        run += [self._fixtures[name] for name in _required(found) if name in self._fixtures]
        return self._assertions.reached([body for each in run for body in bodies_of(each)])

    def _without_assertion(self, found: _Found) -> DataError | None:
        """Return the error of a test that only calls the program, which is none beside tests that assert."""
        reached = self._reached(found)
        name = ".".join(found.path)
        self._refuse_without_effect(name, reached.without_effect)
        if reached.assertions:
            return None
        if reached.others:
            raise DataError(self._without_program(name, reached.others[0]))
        error = DataError(f"{name} has no assertion, so that no program could fail it; add one or remove {name}")
        if not self._assertions.reads(found.function.body, parameters_of(found.function)):
            raise error
        return error

    def _has_assertion(self, body: Sequence[ast.stmt], where: str) -> bool:
        reached = self._assertions.reached([(body, NOTHING)], main=True)
        self._refuse_without_effect(where, reached.without_effect)
        if reached.others and not reached.assertions:
            raise DataError(self._without_program(where, reached.others[0]))
        return bool(reached.assertions)

    def _refuse_without_effect(self, where: str, statements: Sequence[ast.AST]) -> None:
        for each in statements:
            text = escaped(ast.unparse(each), 100)
            if isinstance(each, ast.Assert):
                raise DataError(
                    f"{where}: {text} asserts a tuple, which is always true; write assert CONDITION, MESSAGE without "
                    "parentheses around both"
                )
            raise DataError(f"{where}: {text} is a comparison that nothing reads; write assert before it")

    def _why_none(self) -> str:
        """Return why source without a test of any form has no assertion."""
        if CHECK in self._assertions.definitions and not self._entry_point:
            return "tests define check(candidate), and the row has no entry point, the name of the function"
        for name, definitions in self._assertions.definitions.items():
            for definition, around in definitions:
                if self._assertions.reached(bodies_of(definition, around)).assertions:
                    if self._decorated(definition, NOT_RUN) or name.startswith(("test", "Test")):
                        return f"{name} is skipped, or expected to fail, and there is no other test; {REMEDY}"
                    return f"nothing calls {name}, which has the assertions; name it test_{name.lower()}, or call it"
        return f"the tests have no assertion on what the program computes, so that no program could fail; {REMEDY}"

    def _without_program(self, where: str, node: ast.AST) -> str:
        text = f"{where}: {escaped(ast.unparse(node), 100)} does not depend on the program: it uses none of its names"
        modules = [self._assertions.imported.get(name) for name in names_read(node)]
        foreign = [module for module in modules if module is not None and module.partition(".")[0] not in OWN_MODULES]
        if foreign:
            return f"{text}, but those of the module {foreign[0]}; if that is the program's, import them from solution"
        return (
            f"{text}; call the program's function (where this has the name of a built-in function, the column of the "
            "entry point must name it)"
        )

    def _refuse_unsupported(self) -> None:
        modules = {"pytest"}
        for each in self._nodes:
            if isinstance(each, ast.Import | ast.ImportFrom):
                module = each.module or "" if isinstance(each, ast.ImportFrom) else ""
                for alias in each.names:
                    full = f"{module}.{alias.name}".lstrip(".")
                    bound = alias.asname or (full if module else alias.name).rpartition(".")[2]
                    if not full.startswith(MOCKS) or bound == "*" or bound in self._assertions.uses:
                        self._refuse_import(full)
                    if full == "pytest":
                        modules.add(alias.asname or full)
        for each in self._nodes:
            name = dotted(each)
            package, _, attribute = name.partition(".")
            if package in modules and attribute:
                self._refuse_import(f"pytest.{attribute.partition('.')[0]}")
            last = name.rpartition(".")[2]
            stored = name in CAPTURED and isinstance(getattr(each, "ctx", None), ast.Store)
            reason = INVISIBLE if stored or last in UNSEEN else MOCK if name == MOCKS else ""
            if reason:
                raise DataError(f"the tests use {name}: {reason}; {REMEDY}")
            suppressed: list[Any] = []
            if isinstance(each, ast.With) and any(self._suppresses(item.context_expr) for item in each.items):
                suppressed = [each]
            elif isinstance(each, ast.Try) and any(map(_leaves, each.finalbody)):
                suppressed = [*each.body, *each.handlers, *each.orelse]
            if any(
                isinstance(inner, ast.Assert) or self._assertions.asserts(inner)
                for part in suppressed
                for inner in walk(part)
            ):
                raise DataError(f"the tests suppress the failures of their assertions; {REMEDY}")
            if isinstance(each, ast.Call) and _last(each.func) in ("parametrize", "fixture"):
                for word in each.keywords:
                    if word.arg in ("indirect", "params"):
                        raise DataError(f"the tests use {_last(each.func)}({word.arg}=...): {PYTEST}; {REMEDY}")

    def _refuse_import(self, name: str) -> None:
        package, _, attribute = name.partition(".")
        if name.startswith(MOCKS) or package == "mock":
            raise DataError(f"the tests use unittest.mock: {MOCK}; {REMEDY}")
        if package.startswith("pytest_") or (
            package == "pytest" and attribute not in ("", "*", *pytest_stand_in.__all__)
        ):
            raise DataError(f"the tests use {name}: {PYTEST}; {REMEDY}")

    def _suppresses(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and self._alias(called(node)) == "suppress" and is_broad(node.args)

    def _alias(self, name: str) -> str:
        return self._aliases.get(name, name)

    def _decorated(self, definition: Definition, names: Sequence[str]) -> bool:
        return any(self._alias(_last(each)) in names for each in definition.decorator_list)


def _parse(source: str, what: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, MemoryError) as error:
        raise DataError(f"{what} no Python: {error}") from error


def _last(node: ast.AST) -> str:
    """Return the last name of a decorator or a base: `skip` of `pytest.mark.skip(reason="slow")`."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _fixture_name(function: Function) -> str:
    words = [word for each in function.decorator_list if isinstance(each, ast.Call) for word in each.keywords]
    named = (word.value.value for word in words if word.arg == "name" and isinstance(word.value, ast.Constant))
    return str(next(named, function.name))


def _positional(found: _Found) -> list[str]:
    """Return the positional parameters of a test, `self` included."""
    given = found.function.args
    return [each.arg for each in (*given.posonlyargs, *given.args)]


def _required(found: _Found) -> list[str]:
    """Return the parameters without a default that a test has beside `self`."""
    given = found.function.args
    names = _positional(found)
    names = names[: len(names) - len(given.defaults)]
    if found.in_class and not any(_last(each) == "staticmethod" for each in found.function.decorator_list):
        names = names[1:]
    defaults = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return [*names, *(each.arg for each, default in defaults if default is None)]


def _leaves(node: ast.AST, in_loop: bool = False) -> bool:
    """Return whether a statement may leave the block that it is in, which in `finally` drops an exception."""
    if isinstance(node, ast.Return) or (isinstance(node, ast.Break | ast.Continue) and not in_loop):
        return True
    if isinstance(node, Definition | ast.Lambda):
        return False
    in_loop = in_loop or isinstance(node, ast.For | ast.AsyncFor | ast.While)
    return any(_leaves(each, in_loop) for each in children(node))
