"""Arithmetic of bash, `$((...))`, `((...))` and `let`: whole numbers of 64 bits, with all of bash's operators."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Protocol

_TOKEN = re.compile(
    r"\s*(\d+#[\w@]*|\d\w*|[A-Za-z_]\w*|<<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%<>=!~&|^?:,()\[\]])"
)
_END = re.compile(r"\s*\Z")
_NAME = re.compile(r"[A-Za-z_]\w*")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ@_"
_DEEPEST = 16
"""Variables whose values name each other are followed this far."""


class Names(Protocol):
    """What expressions read and set."""

    def text(self, name: str, index: int) -> str:
        """Return a variable's text, or that of an element of an array; "" where it is not set."""
        ...

    def set_number(self, name: str, index: int | None, value: int) -> None:
        """Set a variable, or an element of an array."""
        ...


def _divided(a: int, b: int) -> int:
    """Return a quotient cut towards 0, as bash does."""
    if b == 0:
        raise ValueError("division by 0")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _raised(a: int, b: int) -> int:
    if b < 0:
        raise ValueError("a negative exponent")
    return pow(a, b, 1 << 64)


_BINARY: Mapping[str, Callable[[int, int], int]] = {
    "*": operator.mul,
    "/": _divided,
    "%": lambda a, b: a - b * _divided(a, b),
    "+": operator.add,
    "-": operator.sub,
    "<<": lambda a, b: a << (b & 63),
    ">>": lambda a, b: a >> (b & 63),
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&": operator.and_,
    "^": operator.xor,
    "|": operator.or_,
    "**": _raised,
}
_LEVELS = (("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-"), ("*", "/", "%"))
_ASSIGNS = ("=", *(f"{each}=" for each in ("*", "/", "%", "+", "-", "<<", ">>", "&", "^", "|")))


def evaluate(source: str, names: Names, depth: int = 0) -> int:
    """Return the value of an expression; "" is 0.

    Args:
        source: its text, `$X` in it already replaced.
        names: what it reads and sets.
        depth: how many variables led here.

    Raises:
        ValueError: bash refuses it.
    """
    if depth > _DEEPEST:
        raise ValueError("variables name each other")
    return _Expression(source, names, depth).value() if source.strip() else 0


def _number(text: str) -> int:
    base, hash_, digits = text.rpartition("#")
    if not hash_:
        base, digits = ("16", text[2:]) if text[:2] in ("0x", "0X") else ("8" if text[0] == "0" else "10", text)
    size = int(base)
    if not 2 <= size <= 64 or (not digits and hash_):
        raise ValueError(f"{text} has no such base")
    value = 0
    for each in digits if size > 36 else digits.lower():
        digit = _DIGITS.index(each)
        if digit >= size:
            raise ValueError(f"{text} is no number")
        value = (value * size + digit) % (1 << 64)  # as bash's, of 64 bits
    return value


def _wrapped(value: int) -> int:
    """Return a number of 64 bits with a sign."""
    return (int(value) + (1 << 63)) % (1 << 64) - (1 << 63)


class _Expression:
    """A parser that evaluates as it reads; a part that `?:`, `&&` or `||` skips is read without effect."""

    def __init__(self, source: str, names: Names, depth: int) -> None:
        self._tokens: list[str] = []
        self._names, self._depth, self._at, self._skips = names, depth, 0, False
        place = 0
        while not _END.match(source, place):
            found = _TOKEN.match(source, place)
            if found is None:
                raise ValueError(f"{source[place:].strip()} is no expression")
            token = found[1]
            if token in ("++", "--") and self._tokens and (self._tokens[-1][0].isdigit() or self._tokens[-1] == ")"):
                token = token[0]  # a number cannot be counted up: `8--X` is `8 - -X`
            self._tokens.append(token)
            place = found.start(1) + len(token)

    def value(self) -> int:
        """Return the value of all of it."""
        found = self._comma()
        if self._at < len(self._tokens):
            raise ValueError(f"{self._tokens[self._at]} is not expected")
        return found

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _took(self, *tokens: str) -> str:
        """Return the next token and go behind it if it is one of these, else ""."""
        found = self._next()
        if found not in tokens or not found:
            return ""
        self._at += 1
        return found

    def _needs(self, token: str) -> None:
        if not self._took(token):
            raise ValueError(f"{token} is missing")

    def _comma(self) -> int:
        found = self._assignment()
        while self._took(","):
            found = self._assignment()
        return found

    def _assignment(self) -> int:
        start = self._at
        place = self._variable()
        sign = self._took(*_ASSIGNS) if place is not None else ""
        if place is None or not sign:
            self._at = start
            return self._choice()
        old = self._read(*place) if sign != "=" else 0
        right = self._assignment()
        return self._set(place, right if sign == "=" or self._skips else _BINARY[sign[:-1]](old, right))

    def _choice(self) -> int:
        found = self._either()
        if not self._took("?"):
            return found
        first = self._skipping(not found, self._comma)
        self._needs(":")
        second = self._skipping(bool(found), self._choice)
        return first if found else second

    def _skipping(self, skips: bool, read: Callable[[], int]) -> int:
        before, self._skips = self._skips, self._skips or skips
        found = read()
        self._skips = before
        return found

    def _either(self) -> int:
        found = self._both()
        while self._took("||"):
            right = self._skipping(bool(found), self._both)
            found = int(bool(found) or bool(right))
        return found

    def _both(self) -> int:
        found = self._binary(0)
        while self._took("&&"):
            right = self._skipping(not found, lambda: self._binary(0))
            found = int(bool(found) and bool(right))
        return found

    def _binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._power()
        found = self._binary(level + 1)
        while sign := self._took(*_LEVELS[level]):
            right = self._binary(level + 1)
            found = 0 if self._skips else _wrapped(_BINARY[sign](found, right))
        return found

    def _power(self) -> int:
        found = self._unary()
        if self._took("**"):
            right = self._power()
            return 0 if self._skips else _wrapped(_raised(found, right))
        return found

    def _unary(self) -> int:
        if sign := self._took("!", "~", "-", "+"):
            found = self._unary()
            return {"!": int(not found), "~": ~found, "-": _wrapped(-found), "+": found}[sign]
        if sign := self._took("++", "--"):
            start, place = self._at, self._variable()
            if place is not None:
                return self._set(place, self._read(*place) + (1 if sign == "++" else -1))
            self._at = start
            return self._unary()  # two signs, as in `--5`
        return self._primary()

    def _primary(self) -> int:
        if self._took("("):
            found = self._comma()
            self._needs(")")
            return found
        place = self._variable()
        if place is not None:
            found = self._read(*place)
            if sign := self._took("++", "--"):
                self._set(place, found + (1 if sign == "++" else -1))
            return found
        text = self._next()
        if not text[:1].isdigit():
            raise ValueError("an operand is missing")
        self._at += 1
        return _wrapped(_number(text))

    def _variable(self) -> tuple[str, int | None] | None:
        """Return the name and index of a variable, and go behind it; None where there is none."""
        name = self._next()
        if not _NAME.fullmatch(name):
            return None
        self._at += 1
        if not self._took("["):
            return name, None
        index = self._comma()
        self._needs("]")
        return name, index

    def _read(self, name: str, index: int | None) -> int:
        return 0 if self._skips else evaluate(self._names.text(name, index or 0), self._names, self._depth + 1)

    def _set(self, place: tuple[str, int | None], value: int) -> int:
        if self._skips:
            return 0
        self._names.set_number(*place, _wrapped(value))
        return _wrapped(value)
