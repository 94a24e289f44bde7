"""Brace expansion of bash: `{1,2}` and `{1..8}` in a word become several words."""

from __future__ import annotations

import re
from itertools import pairwise

from hwgrpo.migrate.imports.bash_words import Part, Word
from hwgrpo.migrate.imports.reading_budget import Budget, check_depth

_NUMBERS = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})(?:\.\.(-?[0-9]{1,18}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?[0-9]{1,18}))?")
_Parts = tuple[Part, ...]


def expand_braces(word: Word, budget: Budget, place: str) -> list[Word]:
    """Return the words that a word becomes: itself, where it has no braces to expand.

    Args:
        word: the word.
        budget: counts what they become, before they do.
        place: of the word, for errors.

    Raises:
        ConfigError: they are too many or too deep.
    """
    opened = sum(_sign(part) == "{" for part in word.parts)
    if word.elements is not None or not opened:
        return [word]
    check_depth(opened, place)
    return [Word(parts) for parts in _expanded(word.parts, budget, place)]


def _expanded(parts: _Parts, budget: Budget, place: str) -> list[_Parts]:
    for start, part in enumerate(parts):
        if _sign(part) != "{":
            continue
        end, commas = _closing(parts, start)
        if end is None:
            continue
        inner = parts[start + 1 : end]
        if commas:
            between = [parts[left + 1 : right] for left, right in pairwise([start, *commas, end])]
            choices = [each for some in between for each in _expanded(some, budget, place)]
        elif texts := _sequence("".join(map(_sign, inner)), budget, place) if all(map(_sign, inner)) else []:
            choices = [(Part(text),) for text in texts]
        else:
            continue
        rest = _expanded(parts[end + 1 :], budget, place)
        budget.spend(len(choices) * len(rest) * (start + 1) + sum(map(len, choices)) * len(rest), place)
        budget.spend(sum(map(len, rest)) * len(choices), place)
        return [(*parts[:start], *each, *tail) for each in choices for tail in rest]
    return [parts]


def _sign(part: Part) -> str:
    """Return the text of a part that is neither quoted nor an expansion, else ""."""
    return "" if part.quoted or part.expands else part.text


def _closing(parts: _Parts, start: int) -> tuple[int | None, list[int]]:
    """Return the place of the bracket that closes the one at `start`, and those of the commas between them."""
    depth, commas = 0, []
    for at in range(start, len(parts)):
        sign = _sign(parts[at])
        depth += (sign == "{") - (sign == "}")
        if sign == "," and depth == 1:
            commas.append(at)
        if not depth:
            return at, commas
    return None, commas


def _sequence(text: str, budget: Budget, place: str) -> list[str]:
    """Return the texts of `1..8`, `01..8..2` or `a..e`; none where it is no sequence."""
    if found := _NUMBERS.fullmatch(text):
        first, last = int(found[1]), int(found[2])
        ends = found[1], found[2]
        padded = any(re.match(r"-?0\d", each) for each in ends)
        width = max(map(len, ends)) if padded else 0
        values = _steps(first, last, found[3])
        budget.spend(len(values) * max(map(len, ends)), place)
        return [f"{value:0{width}d}" for value in values]
    if found := _LETTERS.fullmatch(text):
        return [*map(chr, _steps(ord(found[1]), ord(found[2]), found[3]))]
    return []


def _steps(first: int, last: int, step: str | None) -> range:
    size = abs(int(step or 1)) or 1
    return range(first, last + 1, size) if first <= last else range(first, last - 1, -size)
