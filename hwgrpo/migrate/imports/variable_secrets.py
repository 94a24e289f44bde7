"""Values of environment variables that may be secrets: nothing is read of them, and nothing made of them is written."""

from __future__ import annotations

import re

from hwgrpo.support.text import has_credentials, hide_secrets, is_secret

_STRUCTURE = re.compile(r"\s*(?:[\[{'\"]|--\w|[+~]{0,2}[A-Za-z_]\w*(?:\.\w+)+=[^=])")
"""How a value begins that is a list, a mapping, a quoted text, settings or flags."""
_QUOTED = re.compile(r"\s*(?P<quote>['\"])(?P<text>.*)(?P=quote)\s*", re.DOTALL)
_CLOSED = re.compile(r"\s*(?:\[.*\]|\{.*\}|[^\[{'\"\s].*)\s*", re.DOTALL)
_NUMBER = re.compile(r"\s*[-+]?[0-9]{1,40}\s*")
_SHORTEST_SECRET = 8
"""Length from which the value of any variable may be a secret, unless it is a path or a number."""
_NAMED = re.compile(
    r"(?<![\w.-])(?P<key>[\w.-]++)['\"]?\s*+[:=]\s*+['\"]?(?P<value>[^\s,}\]'\"]*)"
    r"|(?<!\S)--(?P<flag>[\w.-]++)\s++(?P<given>[^\s-]\S*)"
)
"""Keys within a structure, with the beginning of their values."""
_SEPARATORS = re.compile(r"[\s,:\[\]{}'\"=]+")
_NEVER_SECRET = ("", "true", "false", "null", "none")
_PATHS = ("/", "~/", "./", "../")
_KEY_LIKE = re.compile(r"(?<![A-Za-z0-9])(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])[A-Za-z0-9]{16,}")
_BASE64 = re.compile(r"[A-Za-z0-9+][A-Za-z0-9+/]{31,}")
_NO_SECRETS = re.compile(
    r"(?i)tokens|tokeni[sz]\w*|max_token|token_(?:len|id|budget|level)"
    r"|(?:prompt|input|output|label|answer|image|video|chosen|rejected|reward_fn|system|tool|data|source)_keys?$"
)
"""Names of settings that count tokens, or name a column."""


def is_structure(value: str) -> bool:
    """Return whether a value is a list, a mapping, a quoted text, settings or flags: it is read, not written."""
    return bool(_STRUCTURE.match(value))


def names_secret(name: str, value: str) -> bool:
    """Return whether a dotted name is that of a secret; truth values are none, nor are counts of tokens."""
    if value.strip().lower() in _NEVER_SECRET:
        return False
    return any(is_secret(_NO_SECRETS.sub("", each)) for each in name.replace("-", "_").split("."))


def looks_secret(value: str) -> bool:
    """Return whether a value looks like a secret, or has one within it, by its form or the name before it."""
    if has_credentials(value) or hide_secrets(value) != value:
        return True
    for found in _NAMED.finditer(value):
        text = found["value"] or found["given"] or ""
        if not text.startswith("${") and names_secret(found["key"] or found["flag"], text):
            return True
    return any(_is_key(each) for each in _SEPARATORS.split(value) if not each.startswith(_PATHS))


def _is_key(text: str) -> bool:
    """Return whether letters and digits are as keys of services have them; words and versions are shorter."""
    if _KEY_LIKE.search(text):
        return True
    kinds = (str.isdigit, str.isupper, str.islower)
    return bool(_BASE64.fullmatch(text)) and all(any(map(kind, text)) for kind in kinds)


def may_be_secret(name: str, value: str) -> bool:
    """Return whether a variable's value may be a secret: by its name, or as no path, number or short word is."""
    if is_secret(name) or has_credentials(value) or hide_secrets(value) != value:
        return True
    text, is_path = value, "/" in value
    if is_structure(value):
        if looks_secret(value):
            return True
        quoted = _QUOTED.fullmatch(value)
        if not quoted and _CLOSED.fullmatch(value):
            return False
        text = quoted["text"] if quoted else value
        is_path = text.startswith(_PATHS)
    return len(text) >= _SHORTEST_SECRET and not is_path and not _NUMBER.fullmatch(text)
