"""State that the engine shares with the threads that look after its servers."""

from __future__ import annotations

import threading

from hwgrpo.errors import RunError
from hwgrpo.rollout.pause_gate import Gate


class EngineState:
    """What one rank's servers must have, and whether requests go on.

    Args:
        gate: the gate of a thread that generates; None without one.
    """

    def __init__(self, gate: Gate | None) -> None:
        self._gate = gate
        self.changed = threading.Condition()
        """Notified when a server takes requests, or has failed to; guards this object and `RolloutServer.ready`."""
        self.version = 0
        """Version of the weights that the servers must have."""
        self.usable = True
        """Whether `generate` can be called; else the servers sleep, or the engine is closed."""
        self.failure: RunError | None = None
        """Why no request can succeed, once known: other waiting threads stop."""
        self.closed = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether the engine is closed, or the thread that generates is to end."""
        return self.closed.is_set() or (self._gate is not None and self._gate.stopped)

    def check_failure(self) -> None:
        """Raise the failure of another thread."""
        failure = self.failure
        if failure is not None:
            raise RunError(str(failure)) from failure
