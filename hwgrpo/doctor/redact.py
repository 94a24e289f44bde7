"""What must not be shown: secrets in variables and URLs, and in what is posted also home folder, host and user."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hwgrpo.text import HIDDEN, hide_secrets, is_secret


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with the values of secret ones replaced and credentials taken out of the others."""
    return {name: (value and HIDDEN) if is_secret(name) else hide_secrets(value) for name, value in environ.items()}


def for_others(value: str, home: str, host: str, user: str) -> str:
    """Return a text that can be posted: no secrets, `~` for the home folder, and no name of host or user.

    Args:
        home, host, user: what to look for; empty ones, and names too short to be told from words, are not.
    """
    value = hide_secrets(value)
    if len(home) > 1:
        value = re.sub(re.escape(home.rstrip("/")) + r"(?![\w.\-])", "~", value)
    for name, stand_in in ((host, "HOST"), (user, "USER")):
        if len(name) > 2 and name not in ("root", "localhost"):
            value = re.sub(rf"(?<![\w\-]){re.escape(name)}(?![\w\-])", stand_in, value)
    return value
