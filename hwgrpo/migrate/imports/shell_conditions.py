"""Conditions of a bash script, evaluated where all that they compare is known; None stands for unknown."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hwgrpo.migrate.imports.reading_budget import DEEPEST

Truth = bool | None
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


@dataclass(frozen=True)
class Operand:
    """A field of a test, after expansion."""

    text: str | None
    """None: unknown."""
    plain: bool
    """Nothing of it is quoted or expanded: it may be an operator, or a pattern."""
    is_secret: bool = False
    """It may be one, so that no pattern is tried on it."""

    def is_operator(self, *names: str) -> bool:
        """Return whether it is one of some operators."""
        return self.plain and self.text in names


@dataclass
class Block:
    """A compound command that is open."""

    kind: str
    line: int
    runs: Truth = True
    """Whether the command is run."""
    live: Truth = None
    """Whether the commands that are read now are run."""
    taken: Truth = False
    """Whether an earlier branch of an `if` was."""
    condition: Truth = None
    testing: bool = False
    """The commands are those of the condition."""
    subject: Operand = Operand(None, plain=False)
    """What `case` compares."""
    why: str = "is not evaluated"
    """Why it is not known which commands are run."""
    in_patterns: bool = False
    """What is read are the patterns of a branch of `case`."""
    patterns: int = 0
    """How many of them were read."""

    def begin_patterns(self, after: str) -> None:
        """Enter the patterns of a branch, after `in`, `;;` or an operator that lets more than one branch run."""
        self.live, self.condition, self.in_patterns, self.patterns = False, False, True, 0
        if after in (";&", ";;&"):
            self.subject, self.taken = Operand(None, plain=False), None if self.taken else self.taken

    def add_pattern(self, pattern: Operand) -> None:
        """Take in a pattern of a branch."""
        self.condition, self.patterns = either(self.condition, matches(self.subject, pattern)), self.patterns + 1

    def begin_case_branch(self) -> None:
        """Enter the branch after `)`."""
        self.in_patterns = False
        self.begin_branch(self.condition)

    def begin_condition(self) -> None:
        """Enter the condition after `if` or `elif`."""
        self.live, self.testing = both(self.runs, negated(self.taken)), True

    def begin_branch(self, condition: Truth) -> None:
        """Enter the branch after `then` or `else`."""
        self.live, self.testing = both(self.runs, both(negated(self.taken), condition)), False
        self.taken = either(self.taken, condition)

    def add_to_condition(self, status: Truth, after: str) -> None:
        """Take in a command of the condition; `after` is the operator before it."""
        self.condition = {"&&": both, "||": either}.get(after, lambda _, last: last)(self.condition, status)


def negated(a: Truth) -> Truth:
    """Return not a."""
    return None if a is None else not a


def both(a: Truth, b: Truth) -> Truth:
    """Return a and b: False where one is False, whatever the other is."""
    return False if a is False or b is False else None if a is None or b is None else True


def either(a: Truth, b: Truth) -> Truth:
    """Return a or b: True where one is True, whatever the other is."""
    return negated(both(negated(a), negated(b)))


def evaluate_test(operands: Sequence[Operand], *, double: bool) -> Truth:
    """Return the value of `[ ... ]`, or with `double` of `[[ ... ]]`, without its brackets.

    Files, regular expressions, `-a`, `-o` and whatever bash might refuse are unknown.
    """
    if sum(each.is_operator("!", "(") for each in operands) > DEEPEST:
        return None
    return _Expression(operands).value() if double else _single(operands)


def _single(operands: Sequence[Operand]) -> Truth:
    if operands and operands[0].is_operator("!") and len(operands) > 1:
        return negated(_single(operands[1:]))
    return _primary(operands, patterns=False)


def _primary(operands: Sequence[Operand], *, patterns: bool) -> Truth:
    texts = [each.text for each in operands]
    if any(text is None for text in texts) or len(texts) > 3:
        return None
    known = [text for text in texts if text is not None]
    if len(known) < 2:
        return bool(known and known[0])
    if len(known) == 2:
        sign, value = known
        return {"-z": not value, "-n": bool(value)}.get(sign) if operands[0].plain else None
    left, sign, right = known
    if not operands[1].plain:
        return None
    if sign in ("=", "==", "!="):
        same = matches(operands[0], operands[2] if patterns else replace(operands[2], plain=False))
        return negated(same) if sign == "!=" else same
    if sign in _NUMBERS and all(re.fullmatch(r"0|-?[1-9][0-9]{0,18}", each) for each in (left, right)):
        return _NUMBERS[sign](int(left), int(right))
    return None


def matches(subject: Operand, pattern: Operand) -> Truth:
    """Return whether a text matches a pattern; one with a quoted or expanded part beside its `*` makes it unknown."""
    if pattern.plain and pattern.text == "*":
        return True
    if subject.text is None or pattern.text is None:
        return None
    if not any(character in pattern.text for character in "*?[\\"):
        return subject.text == pattern.text
    if not pattern.plain or subject.is_secret or any(each in pattern.text for each in "[\\"):
        return None
    return fnmatch.fnmatchcase(subject.text, pattern.text)


class _Expression:
    """`[[ ... ]]`: primaries with `!`, `&&`, `||` and brackets between them."""

    def __init__(self, operands: Sequence[Operand]) -> None:
        self._operands, self._at = operands, 0

    def value(self) -> Truth:
        found = self._any()
        return found if self._at == len(self._operands) else None

    def _skip(self, *names: str) -> bool:
        if self._at < len(self._operands) and self._operands[self._at].is_operator(*names):
            self._at += 1
            return True
        return False

    def _any(self) -> Truth:
        found = self._all()
        while self._skip("||"):
            found = either(found, self._all())
        return found

    def _all(self) -> Truth:
        found = self._one()
        while self._skip("&&"):
            found = both(found, self._one())
        return found

    def _one(self) -> Truth:
        if self._skip("!"):
            return negated(self._one())
        if self._skip("("):
            found = self._any()
            return found if self._skip(")") else None
        start = self._at
        while self._at < len(self._operands) and not self._operands[self._at].is_operator("&&", "||", "(", ")"):
            self._at += 1
        return _primary(self._operands[start : self._at], patterns=True)
