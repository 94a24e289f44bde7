"""One line of a diagnosis: what was looked at, what was found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FindingState = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check came to."""

    what: str
    state: FindingState = "ok"
    found: str
    fix: str = ""
    """What the user can do about it; empty when there is nothing to repair."""
    backends: tuple[str, ...] = ()
    """The backends it stands in the way of; empty means every one."""

    def concerns(self, backend: str | None) -> bool:
        """Tell whether it matters to `backend`; None stands for a host on which none could be chosen."""
        return not self.backends or backend is None or backend in self.backends
