"""Brace expansion of bash: `{1,2}` and `{1..8}` in a word become several words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from hwgrpo.imports.bash_words import Part, Word

_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d+))?")
_Parts = tuple[Part, ...]


def expand_braces(word: Word) -> list[Word]:
    """Return the words that a word becomes: itself, where it has no braces to expand."""
    return [word] if word.elements is not None else [Word(parts) for parts in _expanded(word.parts)]


def _expanded(parts: _Parts) -> list[_Parts]:
    for start, part in enumerate(parts):
        if _sign(part) != "{":
            continue
        end, commas = _closing(parts, start)
        if end is None:
            continue
        inner = parts[start + 1 : end]
        if commas:
            bounds = [start, *commas, end]
            choices = [each for left, right in pairwise(bounds) for each in _expanded(parts[left + 1 : right])]
        elif all(_sign(each) for each in inner) and (texts := [*_sequence("".join(each.text for each in inner))]):
            choices = [(Part(text),) for text in texts]
        else:
            continue
        rest = _expanded(parts[end + 1 :])
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


def _sequence(text: str) -> Iterator[str]:
    """Yield the texts of `1..8`, `01..8..2` or `a..e`; none where it is no sequence."""
    if found := _NUMBERS.fullmatch(text):
        first, last = int(found[1]), int(found[2])
        ends = found[1], found[2]
        padded = any(re.match(r"-?0\d", each) for each in ends)
        width = max(map(len, ends)) if padded else 0
        for value in _steps(first, last, found[3]):
            yield f"{value:0{width}d}"
    elif found := _LETTERS.fullmatch(text):
        for value in _steps(ord(found[1]), ord(found[2]), found[3]):
            yield chr(value)


def _steps(first: int, last: int, step: str | None) -> range:
    size = abs(int(step or 1)) or 1
    return range(first, last + 1, size) if first <= last else range(first, last - 1, -size)
