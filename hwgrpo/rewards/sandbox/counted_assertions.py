"""Compilation of tests so that each assertion on the program is counted when it is executed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from hwgrpo.rewards.sandbox.assertions import (
    NOTHING,
    Assertions,
    Function,
    expects_exception,
    parameters_of,
    swallows,
    walk,
)

OF_PROGRAM = "_of_program"
"""Attribute of exceptions that the program raised."""
SEEN, HIDDEN = "@seen", "@hidden"
"""Names of the functions that tests call, which no source can spell."""


def of_program(error: BaseException) -> BaseException:
    """Mark an exception as the program's."""
    setattr(error, OF_PROGRAM, True)
    return error


class Counter:
    """The assertions that a test has executed.

    Args:
        has_asked: returns whether the tests have asked the program for anything: before, nothing depends on it.
    """

    def __init__(self, has_asked: Callable[[], bool]) -> None:
        self._has_asked = has_asked
        self.executed = 0
        self.hidden: BaseException | None = None
        """A failure that the test itself caught."""

    def names(self) -> dict[str, Any]:
        """Return the functions that compiled tests call."""
        return {SEEN: self._see, HIDDEN: self._hide}

    def reset(self) -> None:
        """Begin another test."""
        self.executed, self.hidden = 0, None

    def _see(self, value: Any = None) -> Any:
        self.executed += self._has_asked()
        return value

    def _hide(self, any_kind: bool) -> None:
        error = sys.exception()
        if any_kind or (isinstance(error, AssertionError) and not hasattr(error, OF_PROGRAM)):
            self.hidden = self.hidden or error


def compile_counted(source: str, name: str, assertions: Assertions) -> CodeType:
    """Compile source whose assertions are counted.

    Args:
        source: a part of the tests.
        name: shown in tracebacks.
        assertions: of all of them.
    """
    tree = _Rewriter(assertions).visit(ast.parse(source))
    return compile(ast.fix_missing_locations(tree), name, "exec", dont_inherit=True)


class _Rewriter(ast.NodeTransformer):
    def __init__(self, assertions: Assertions) -> None:
        self._assertions = assertions
        self._parameters = NOTHING

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
                return _call(SEEN, node)
            case ast.With() | ast.AsyncWith() if counts:
                return [node, ast.Expr(_call(SEEN))]
            case ast.Try():
                expects = expects_exception(node)
                for handler in node.handlers:
                    if counts:
                        handler.body.insert(0, ast.Expr(_call(SEEN)))
                    if swallows(handler):
                        handler.body.insert(0, ast.Expr(_call(HIDDEN, ast.Constant(contains and not expects))))
        return node

    def _contains_assertion(self, body: Sequence[ast.stmt]) -> bool:
        nodes = (node for each in body for node in walk(each))
        return any(self._assertions.is_assertion(node, self._parameters) for node in nodes)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])
