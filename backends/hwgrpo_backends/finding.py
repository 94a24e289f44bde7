"""One line of a diagnosis: subject, finding and remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FindingState = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check."""

    what: str
    state: FindingState = "ok"
    found: str
    fix: str = ""
    """What the user can do about it; empty when there is nothing to repair."""
    backends: tuple[str, ...] = ()
    """The backends that it concerns; empty means every one."""

    def concerns(self, backend: str | None) -> bool:
        """Return whether it concerns `backend`; None means a host on which none could be selected."""
        return not self.backends or backend is None or backend in self.backends
