"""What must not be shown: secrets in variables and URLs, and in what is posted also home folder, host and user."""

from __future__ import annotations

import re
from collections.abc import Mapping

HIDDEN = "(set, not shown)"
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PWD|CREDENTIAL|AUTH|COOKIE|SIGNATURE|PRIVATE|(^|_)(API_?)?KEY(_|S?$)", re.I
)
_SECRET_VALUE = re.compile(r"\b(hf_|ghp_|gho_|github_pat_|sk-|xox[abp]-|AKIA|glpat-)[A-Za-z0-9_\-]{8,}")
_CREDENTIALS = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.\-]*://)[^/\s@]+@")
_QUERY = re.compile(r"(?P<name>[?&][\w\-]*(?:token|key|secret|sig|signature|password)[\w\-]*=)[^&\s]+", re.I)


def is_secret(name: str) -> bool:
    """Tell whether a variable's name says that its value is nobody's business."""
    return bool(_SECRET_NAME.search(name))


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with the values of secret ones replaced and credentials taken out of the others."""
    return {name: (value and HIDDEN) if is_secret(name) else text(value) for name, value in environ.items()}


def text(value: str) -> str:
    """Return a text without credentials in URLs and without words that have the form of a token."""
    value = _CREDENTIALS.sub(r"\g<scheme>***@", value)
    return _SECRET_VALUE.sub(r"\g<1>***", _QUERY.sub(r"\g<name>***", value))


def for_others(value: str, home: str, host: str, user: str) -> str:
    """Return a text that can be posted: no secrets, `~` for the home folder, and no name of host or user.

    Args:
        home, host, user: what to look for; empty ones, and names too short to be told from words, are not.
    """
    value = text(value)
    if len(home) > 1:
        value = re.sub(re.escape(home.rstrip("/")) + r"(?![\w.\-])", "~", value)
    for name, stand_in in ((host, "HOST"), (user, "USER")):
        if len(name) > 2 and name not in ("root", "localhost"):
            value = re.sub(rf"(?<![\w\-]){re.escape(name)}(?![\w\-])", stand_in, value)
    return value
