"""What stands in the place of a value where a call gave none, and how that is told."""

from __future__ import annotations

import signal

from hwgrpo.user_code import describe_error


class Raised(Exception):
    """A call in another process raised.

    Args:
        kind: the name of the exception's class.
        text: what the exception says.
        place: where it came from, as `source_line` tells it.
    """

    def __init__(self, kind: str, text: str, place: str) -> None:
        super().__init__(text or kind)
        self.kind, self.text, self.place = kind, text, place


class Overran(Exception):
    """A call took longer than its timeout, and was stopped."""


class ProcessDied(Exception):
    """A call ended the process that it ran in."""


def told(error: BaseException) -> str:
    """Say what a call did, in words that follow its name."""
    if isinstance(error, Overran | ProcessDied):
        return str(error)
    if isinstance(error, Raised):
        return f"raised {error.kind}{f': {error.text}' if error.text else ''}{error.place}"
    return f"raised {describe_error(error)}"


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
