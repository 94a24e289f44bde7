"""Text folded into the columns of a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Any


def terminal_columns() -> int | None:
    """Return the width of the terminal; None without one, so that nothing is wrapped."""
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size((100, 24)).columns if on_terminal else None


def fold(text: Any, width: int | None, indent: str = "") -> list[str]:
    """Wrap a text; lines after the first begin with `indent`. Long words (paths) are not broken.

    Args:
        width: how long a line may be, though never less than 20; None for one line.
    """
    flat = " ".join(str(text).split())
    if width is None:
        return [flat]
    wrapped = textwrap.wrap(
        flat, max(width, 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapped or [""]


def format_bytes(count: int) -> str:
    """Return bytes as people read them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"
