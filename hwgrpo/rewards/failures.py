"""What stands in the place of a value where a call gave none, and how that is told."""

from __future__ import annotations

import asyncio
import dis
import signal
import traceback
from pathlib import Path

import hwgrpo
from hwgrpo.errors import error_text, escaped

_NOT_THEIRS = (str(Path(hwgrpo.__file__).parent), str(Path(asyncio.__file__).parent), "<frozen importlib")
"""Folders of the code that calls reward functions."""
LINE = 200
"""Characters of a line of code that a message shows."""


class Raised(Exception):
    """A call in another process raised.

    Args:
        kind: the name of the exception's class.
        text: what the exception says.
        place: where it came from, as `place_of` tells it.
    """

    def __init__(self, kind: str, text: str, place: str) -> None:
        super().__init__(text or kind)
        self.kind, self.text, self.place = kind, text, place


class Overran(Exception):
    """A call took longer than its timeout, and was stopped."""


class ProcessDied(Exception):
    """A call ended the process that it ran in."""


def is_own(error: BaseException) -> bool:
    """Tell whether a function itself raised an error; neither Ctrl-C nor a cancelled asyncio task did.

    Python raises KeyboardInterrupt for Ctrl-C at whatever instruction a program is, but never at a `raise` statement.
    """
    if isinstance(error, Exception):
        return True
    if not isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_filename.startswith(_NOT_THEIRS):
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def described(error: BaseException) -> str:
    """Return an exception's class, what it says, and the line of the function's file that it came from."""
    text = error_text(error)
    return f"{type(error).__name__}{f': {text}' if text else ''}{place_of(error)}"


def told(error: BaseException) -> str:
    """Say what a call did, in words that follow its name."""
    if isinstance(error, Overran | ProcessDied):
        return str(error)
    if isinstance(error, Raised):
        return f"raised {error.kind}{f': {error.text}' if error.text else ''}{error.place}"
    return f"raised {described(error)}"


def place_of(error: BaseException) -> str:
    """Return the line of the function's own file that an exception came from, in words; "" where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    entered = next((frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)), None)
    if entered is None:
        return ""
    last = [frame for frame in frames if frame.filename == entered.filename][-1]
    return f" at {last.filename}:{last.lineno}" + (f", `{escaped(last.line, LINE)}`" if last.line else "")


def how_it_ended(code: int | None) -> str:
    """Say how a process ended, in words that follow "its process".

    Args:
        code: as `subprocess` gives it: an exit code, or minus the number of a signal; None when it goes on.
    """
    if code is None:
        return "closed the connection to the trainer"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in {each.value for each in signal.Signals} else f"signal {-code}"
    why = {"SIGSEGV": ", a segmentation fault", "SIGKILL": "; the system does that when memory runs out"}.get(name, "")
    return f"was killed by {name}{why}"
