"""Text with values of environment variables: it stays an interpolation wherever it is printed or written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hwgrpo.migrate.imports.variable_secrets import looks_secret, names_secret

_VARIABLE = re.compile(r"\boc\.env:\s*+(\w+)")


class VariableText(str):
    """A text as it is written, with `${oc.env:NAME}` in it, so that whatever shows it shows no value of a variable.

    Example:
        VariableText("${oc.env:HOME}/data", "/home/me/data")
    """

    value: str
    """What it stands for: for checks, `known`."""

    def __new__(cls, written: str, value: str) -> VariableText:
        """Return the text of both."""
        text = super().__new__(cls, written)
        text.value = value
        return text

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        """Return what a copy is made of."""
        return str(self), self.value

    @property
    def may_be_secret(self) -> bool:
        """Whether a variable has the name of a secret, or the value looks like one."""
        named = any(names_secret(name, self.value) for name in _VARIABLE.findall(str(self)))
        return named or looks_secret(self.value)

    def rpartition(self, sep: str) -> tuple[str, str, str]:  # type: ignore[override]
        """Return the pieces before and behind the last separator that is in no interpolation."""
        before, found, behind = str(self).rpartition(sep)
        if before.rfind("${") > before.rfind("}"):
            return "", "", self
        first, _, last = self.value.rpartition(sep)
        pieces = ((before, first), (behind, last))
        before, behind = (VariableText(a, b) if "${" in a else a for a, b in pieces)
        return before, found, behind


def joined(*pieces: Any) -> str:
    """Return pieces as one text, of that kind if one of them is."""
    written = "".join(map(str, pieces))
    if not any(isinstance(each, VariableText) for each in pieces):
        return written
    return VariableText(written, "".join(str(known(each)) for each in pieces))


def known(value: Any) -> Any:
    """Return a value with that of its variables, for a check; never print or write it."""
    if isinstance(value, VariableText):
        return value.value
    if isinstance(value, list):
        return [known(each) for each in value]
    return {key: known(each) for key, each in value.items()} if isinstance(value, dict) else value


def variables_in(value: Any) -> Iterator[VariableText]:
    """Yield the texts with variables in a value, in lists and mappings, too."""
    if isinstance(value, VariableText):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from variables_in(each)
