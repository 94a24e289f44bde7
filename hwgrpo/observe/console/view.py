"""Choose what shows a run: a live panel on a terminal, a line per step elsewhere, or nothing."""

from __future__ import annotations

import io
import sys

from hwgrpo.observe.console.progress import PlainLines, Progress, Silence


def choose_progress(kind: str, *, title: str, total_steps: int, log_every: int) -> Progress:
    """Return the way to show a run.

    Args:
        kind: `rich`, `plain` or `none`; `auto` is `rich` on a terminal that can move its cursor, else `plain`.
        title: heading of the panel.
        total_steps: steps of the run.
        log_every: steps between plain lines.
    """
    if kind == "none":
        return Silence()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a model writes may hold characters that this terminal's encoding lacks; they are shown as question
        # marks instead of ending the run.
        sys.stdout.reconfigure(errors="replace")
    if kind in ("rich", "auto"):
        from rich.console import Console

        from hwgrpo.observe.console.panel import LivePanel

        console = Console(force_terminal=True if kind == "rich" else None)
        if kind == "rich" or (console.is_terminal and not console.is_dumb_terminal):
            return LivePanel(console, title, total_steps)
    else:
        assert kind == "plain", f"observe.progress={kind!r} passed validation"
    return PlainLines(total_steps, log_every)
