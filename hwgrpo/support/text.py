"""Text as it may be shown: without secrets, and with nothing in it that steers a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote

HIDDEN = "(set, not shown)"
"""Stands where the value of a secret would."""
MASK = "***"
"""Stands where a part of a value is a secret."""
SHORTEST = 6
"""Minimum length of a secret that is searched for: shorter ones occur in ordinary text."""
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PWD|CREDENTIAL|AUTH|COOKIE|SIGNATURE|PRIVATE|(^|_)(API_?)?KEY(_|S?$)", re.I
)
_SECRET_VALUE = re.compile(r"\b(hf_|ghp_|gho_|github_pat_|sk-|xox[abp]-|AKIA|glpat-)([A-Za-z0-9_\-]{8,})")
"""What begins like a token; one has a digit or a capital after its prefix, as `hf_overrides` has not."""
_DIGIT_OR_CAPITAL = re.compile(r"[A-Z0-9]")
_CREDENTIALS = re.compile(r"(?P<scheme>[a-zA-Z0-9+.\-]://)[^/\s@]+@")
"""A URL from the end of its scheme on: a search for the scheme's beginning reads long words again and again."""
_QUERY = re.compile(
    r"(?P<name>[?&](?=[\w\-]*?(?:token|key|secret|sig|signature|password))[\w\-]++=)[^&\s]+", re.IGNORECASE
)
_KEY = re.compile(r"(?=[^0-9]*[0-9])[A-Za-z0-9_\-]{20,}")
"""A key as services issue them, as the 40 hexadecimal digits of W&B's."""
_remembered: dict[str, None] = {}


def is_secret(name: str) -> bool:
    """Return whether a name is that of a secret."""
    return bool(_SECRET_NAME.search(name))


def has_credentials(value: str) -> bool:
    """Return whether a text contains credentials in a URL."""
    return bool(_CREDENTIALS.search(value) or _QUERY.search(value))


def without_credentials(value: str, stand_in: str = MASK) -> str:
    """Return a text without credentials in URLs; interpolations reveal nothing and stay.

    Args:
        value: the text.
        stand_in: replaces them; "" leaves nothing of any, not even the @.
    """

    def replaced(found: re.Match[str]) -> str:
        if stand_in and "${" in found[0]:
            return found[0]
        return found[1] + stand_in + ("@" if stand_in and found.re is _CREDENTIALS else "")

    return _QUERY.sub(replaced, _CREDENTIALS.sub(replaced, value))


def remember_secrets(values: Iterable[str]) -> None:
    """Have `hide_secrets` replace these values wherever they occur, as they are and as errors quote them."""
    for value in values:
        if len(value) >= SHORTEST:
            _remembered.update(
                dict.fromkeys((value, repr(value)[1:-1], json.dumps(value)[1:-1], quote(value, safe="")))
            )


def keys_in(environment: Mapping[str, str]) -> list[str]:
    """Return the values of variables named as secrets that are keys, and not paths or flags."""
    return [value for name, value in environment.items() if is_secret(name) and _KEY.fullmatch(value)]


def hide_secrets(text: str) -> str:
    """Return a text without registered secrets, credentials in URLs, and strings in the form of a token."""
    text = _without_tokens(text)  # first: without a part that is registered, one has no form
    registered = {form for value in _remembered for form in (value, _without_tokens(value))}
    for value in sorted(registered, key=len, reverse=True):  # one may be a part of another
        text = text.replace(value, MASK)
    return without_credentials(text)


def _without_tokens(text: str) -> str:
    """Return a text with tokens of services as their prefix and `***`."""
    return _SECRET_VALUE.sub(lambda found: found[1] + MASK if _DIGIT_OR_CAPITAL.search(found[2]) else found[0], text)


def one_line(text: str) -> str:
    """Return a text on one line: line ends become `↵` and other characters that cannot be printed `·`.

    Data and models write escape sequences that move the cursor, and line ends that make a line look like ours.
    """
    return "".join("↵" if char == "\n" else char if char.isprintable() else "·" for char in text)


def block(text: str) -> str:
    """Return a text whose lines stay lines: all but the first are indented, the rest is as `one_line` has it.

    A line that begins at the margin is the program's own.
    """
    first, *rest = text.split("\n")
    return "\n".join([one_line(first), *(f"  {one_line(line)}" if line else "" for line in rest)])


def terminal_line(text: str) -> str:
    """Return a text for a terminal: without secrets, on one line."""
    return one_line(hide_secrets(text))


def terminal_lines(text: str) -> str:
    """Return a text for a terminal: without secrets, its further lines indented."""
    return block(hide_secrets(text))


def shown_mapping(values: Mapping[str, object]) -> dict[str, object]:
    """Return a free-form mapping as it may be shown: texts under names of secrets hidden, credentials left out."""
    return {name: _shown(value, secret=is_secret(str(name))) for name, value in values.items()}


def _shown(value: object, *, secret: bool) -> object:
    if isinstance(value, Mapping):
        return {name: _shown(inner, secret=secret or is_secret(str(name))) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(inner, secret=secret) for inner in value]
    if not isinstance(value, str) or not value:
        return value
    if not secret:
        return hide_secrets(value)
    # an interpolation names a variable; the default that may follow is the secret's own
    return re.sub(r",[^{}]*\}", ",***}", value) if "${" in value else HIDDEN
