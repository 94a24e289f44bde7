"""Arithmetic of bash, of text without variables."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: lambda a, b: a - b * _divided(a, b),
    ast.Div: lambda a, b: _divided(a, b),
}


def evaluate(text: str) -> str:
    """Return the value of an expression.

    Raises:
        ValueError: it cannot be read as one, or divides by zero.
    """
    try:
        return str(_evaluated(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(str(error)) from error


def _divided(a: int, b: int) -> int:
    """Return a quotient cut towards 0, as bash does."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    raise ValueError
