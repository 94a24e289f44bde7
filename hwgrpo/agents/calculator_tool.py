"""The tool `calculator`: exact arithmetic on the numbers of an expression."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
LONGEST = 1000
"""Characters of an expression, and digits of a number in it."""


class Calculator:
    """Exact arithmetic: no value is rounded before the result is written."""

    def run(self, expression: str) -> str | tuple[str, str]:
        """Calculate the value of an arithmetic expression.

        Args:
            expression: numbers with + - * / // % ** and parentheses, such as (12 + 3.5) * 4.

        Returns:
            the value
        """
        try:
            if len(expression) > LONGEST:
                raise ValueError(f"it is longer than {LONGEST} characters")
            return _written(_value(ast.parse(expression.strip(), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, OverflowError, MemoryError, RecursionError) as error:
            return f"Error: {expression[:100]!r} cannot be calculated: {error}", "error"

    def close(self) -> None:
        """Free nothing."""


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return Fraction(str(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in BINARY:
            first, second = _value(left), _value(right)
            if isinstance(op, ast.Pow):
                _check_power(first, second)
            return _bounded(Fraction(BINARY[type(op)](first, second)))
    raise ValueError("it is not arithmetic on numbers")


def _check_power(base: Fraction, exponent: Fraction) -> None:
    digits = max(len(str(abs(base.numerator))), len(str(base.denominator)))
    if exponent.denominator != 1 or abs(exponent) * digits > LONGEST:
        raise ValueError("its exponent is too large, or no whole number")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 4 * LONGEST:
        raise ValueError("a number in it is too long")
    return value


def _written(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"
