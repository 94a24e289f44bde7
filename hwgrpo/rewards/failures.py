"""Exceptions of failed calls of reward functions, and their description."""

from __future__ import annotations

import signal

from hwgrpo.user_code import describe_error


class Raised(Exception):
    """An exception of a call in another process.

    Args:
        kind: name of the exception's class.
        text: message of the exception.
        place: where it was raised, as given by `source_line`.
    """

    def __init__(self, kind: str, text: str, place: str) -> None:
        super().__init__(text or kind)
        self.kind, self.text, self.place = kind, text, place


class TimedOut(Exception):
    """A call that exceeded its timeout and was stopped."""


class ProcessDied(Exception):
    """A call that ended its process."""


class StepMismatch(Exception):
    """Another number of rewards than the response has steps."""


class Cancelled(Exception):
    """A call of an async function that code of a reward cancelled."""

    def __init__(self) -> None:
        super().__init__("was cancelled, with tasks of the event loop that are not its own")


def describe_failure(error: BaseException) -> str:
    """Describe a failure, as a predicate to the function's name."""
    if isinstance(error, TimedOut | ProcessDied | StepMismatch | Cancelled):
        return str(error)
    if isinstance(error, Raised):
        return f"raised {error.kind}{f': {error.text}' if error.text else ''}{error.place}"
    return f"raised {describe_error(error)}"


def describe_exit(code: int | None) -> str:
    """Describe the exit of a process, as a predicate to "its process".

    Args:
        code: return code of `subprocess`: an exit code, or minus the number of a signal; None while it runs.
    """
    if code is None:
        return "closed the connection to the trainer"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in {each.value for each in signal.Signals} else f"signal {-code}"
    reason = {"SIGSEGV": ", a segmentation fault", "SIGKILL": "; the system does that when memory runs out"}.get(
        name, ""
    )
    return f"was killed by {name}{reason}"
