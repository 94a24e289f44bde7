"""Removal of secrets in variables and URLs, and, for public text, of home folder, host and user."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hwgrpo.support.text import HIDDEN, hide_secrets, is_secret


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with secret values replaced and credentials in URLs removed."""
    return {name: (value and HIDDEN) if is_secret(name) else hide_secrets(value) for name, value in environ.items()}


def for_others(value: str, home: str, host: str, user: str) -> str:
    """Return a text for the public: no secrets, `~` for the home folder, and no name of host or user.

    Args:
        value: the text.
        home, host, user: texts to replace; ignored where empty or so short that they could be ordinary words.
    """
    value = hide_secrets(value)
    if len(home) > 1:
        value = re.sub(re.escape(home.rstrip("/")) + r"(?![\w.\-])", "~", value)
    for name, stand_in in ((host, "HOST"), (user, "USER")):
        if len(name) > 2 and name not in ("root", "localhost"):
            value = re.sub(rf"(?<![\w\-]){re.escape(name)}(?![\w\-])", stand_in, value)
    return value
