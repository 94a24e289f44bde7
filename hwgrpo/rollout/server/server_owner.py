"""Owner of the weights on a rollout server: their label names version, run and process."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote, unquote

from hwgrpo.rollout.server.http_client import ServerInUse

RUN_ID_BYTES = 8


@dataclass(frozen=True)
class Owner:
    """One start of one run; all its ranks are one owner."""

    run: str
    """Random id of the run, kept when it resumes."""
    session: str
    """Random id of this start."""
    name: str
    """Host, folder and process, for messages."""
    take_over: bool = False
    """Claim a server that another run owns."""

    def label(self, version: int) -> str:
        """Return the label of a version of this owner's weights; it fits an HTTP header."""
        return ":".join((str(version), self.run, self.session, quote(self.name, safe="/")))

    def payload(self) -> dict[str, Any]:
        """Return the owner as a JSON-able part of requests."""
        return asdict(self)


def new_run_id() -> str:
    """Return a random id."""
    return secrets.token_hex(RUN_ID_BYTES)


def new_owner(run: str | None, folder: str, *, take_over: bool) -> Owner:
    """Return this process as an owner.

    Args:
        run: id of the run; None for a run that cannot resume.
        folder: the run's output folder.
        take_over: claim a server that another run owns.
    """
    name = f"{socket.gethostname()}:{os.path.abspath(folder)} (process {os.getpid()})"
    return Owner(run or new_run_id(), new_run_id(), name, take_over)


def parse_owner(label: Any) -> Owner | None:
    """Return the owner that a label names; None for another label, as before any weights are sent."""
    fields = label.split(":") if isinstance(label, str) else []
    return Owner(fields[1], fields[2], unquote(fields[3])) if len(fields) == 4 else None


def check_owner(label: Any, owner: Owner) -> None:
    """Check that a server's weights, if any, are from this owner.

    Raises:
        ServerInUse: they are from another owner.
    """
    holder = parse_owner(label)
    if holder is not None and holder.session != owner.session:
        same = ", another process of this same run" if holder.run == owner.run else ""
        raise ServerInUse(holder.name + same)
