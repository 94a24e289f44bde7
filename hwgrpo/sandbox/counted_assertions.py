"""Compilation of tests so that each assertion on the program is counted when it is executed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from hwgrpo.sandbox.assertions import (
    NOTHING,
    Assertions,
    Function,
    is_data,
    parameters_of,
    swallows,
    walk,
)

SEEN, CHECKING, FAILING, EXPECTED, HIDDEN = "@seen", "@checking", "@failing", "@expected", "@hidden"
"""Names of the functions that tests call, which no source can spell."""

RECURSION = 5000
"""Calls within each other for source as deep as it may be where its tests are read: several for each level."""


class Counter:
    """The assertions that a test has executed.

    Args:
        has_asked: returns whether the tests have asked the program for anything: before, nothing depends on it.
        is_of_program: returns whether a function is the program's, which asserts nothing, whatever its name.
    """

    def __init__(self, has_asked: Callable[[], bool], is_of_program: Callable[[Any], bool]) -> None:
        self._has_asked, self._is_of_program = has_asked, is_of_program
        self._failing = False
        self.executed = 0
        self.hidden: BaseException | None = None
        """A failure that the test itself caught."""

    def names(self) -> dict[str, Any]:
        """Return the functions that compiled tests call."""
        functions = (self.see, self._check, self._fail, self._expect, self._hide)
        return dict(zip((SEEN, CHECKING, FAILING, EXPECTED, HIDDEN), functions, strict=True))

    def reset(self) -> None:
        """Begin another test."""
        self._failing, self.executed, self.hidden = False, 0, None

    def hide(self, error: BaseException | None) -> None:
        """Store a failure that does not end the test."""
        self.hidden = self.hidden or error

    def see(self, value: Any = None) -> Any:
        """Count an assertion; return the value."""
        self.executed += self._has_asked()
        return value

    def _check(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that asserts, with its calls counted."""
        if self._is_of_program(function):
            return function
        return lambda *arguments, **named: self.see(function(*arguments, **named))

    def _fail(self) -> None:
        self._failing = True

    def _expect(self) -> None:
        """Count an exception that was expected, unless it is that of the statement that fails without one."""
        if self._failing:
            self.hide(sys.exception())
        self._failing = False
        self.see()

    def _hide(self, any_kind: bool) -> None:
        error = sys.exception()
        if any_kind or isinstance(error, AssertionError):
            self.hide(error)


def compile_counted(source: str, name: str, assertions: Assertions) -> CodeType:
    """Compile source whose assertions are counted.

    Args:
        source: a part of the tests.
        name: shown in tracebacks.
        assertions: of all of them.
    """
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, RECURSION))
    try:
        tree = _Rewriter(assertions).visit(ast.parse(source))
        return compile(ast.fix_missing_locations(tree), name, "exec", dont_inherit=True)
    finally:
        sys.setrecursionlimit(limit)


class _Rewriter(ast.NodeTransformer):
    def __init__(self, assertions: Assertions) -> None:
        self._assertions = assertions
        self._parameters = NOTHING

    def visit(self, node: ast.AST) -> Any:
        return node if is_data(node) else self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> Any:
        before = self._parameters
        if isinstance(node, Function | ast.Lambda):
            self._parameters = before | parameters_of(node)
        counts = self._assertions.is_assertion(node, before)  # as it is written, not as it is rewritten
        contains = isinstance(node, ast.Try) and self._contains_assertion(node.body)
        super().generic_visit(node)
        self._parameters = before
        match node:
            case ast.Assert() | ast.If() if counts:
                node.test = _call(SEEN, node.test)
            case ast.Call() if counts:
                node.func = _call(CHECKING, node.func)
            case ast.With() | ast.AsyncWith() if counts:
                return [node, ast.Expr(_call(SEEN))]
            case ast.Try():
                expects = counts and self._assertions.expects_exception(node)
                if expects:
                    failing = self._assertions.failing(node.body)
                    if failing is not None:
                        node.body.insert(node.body.index(failing), ast.Expr(_call(FAILING)))
                elif counts:
                    node.body.append(ast.Expr(_call(SEEN)))
                for handler in node.handlers:
                    if swallows(handler) and (contains or not expects):
                        handler.body.insert(0, ast.Expr(_call(HIDDEN, ast.Constant(contains and not expects))))
                    if expects:
                        handler.body.insert(0, ast.Expr(_call(EXPECTED)))
        return node

    def _contains_assertion(self, body: Sequence[ast.stmt]) -> bool:
        nodes = (node for each in body for node in walk(each))
        return any(self._assertions.is_assertion(node, self._parameters) for node in nodes)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])
