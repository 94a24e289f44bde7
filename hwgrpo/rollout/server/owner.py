"""Whose weights a rollout server has: a label for each version, which names the run and the process that sent them."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote, unquote

from hwgrpo.rollout.server.http_client import ServerTaken

RUN_ID_BYTES = 8


@dataclass(frozen=True)
class Owner:
    """One process of one run; all its ranks are one owner."""

    run: str
    """Random id of the run, which a start that resumes it has, too."""
    session: str
    """Random id of this start."""
    name: str
    """Host, folder and process, for people."""
    take_over: bool = False
    """Take a server from another run."""

    def label(self, version: int) -> str:
        """Return what a server calls a version of this owner's weights; it fits an HTTP header."""
        return ":".join((str(version), self.run, self.session, quote(self.name, safe="/")))

    def order(self) -> dict[str, Any]:
        """Return what a server is asked with, JSON-able."""
        return asdict(self)


def new_run_id() -> str:
    """Return a random id."""
    return secrets.token_hex(RUN_ID_BYTES)


def new_owner(run: str | None, folder: str, *, take_over: bool) -> Owner:
    """Return this process as an owner.

    Args:
        run: id of the run; None: of nothing that will be resumed.
        folder: the run's.
        take_over: take a server from another run.
    """
    name = f"{socket.gethostname()}:{os.path.abspath(folder)} (process {os.getpid()})"
    return Owner(run or new_run_id(), new_run_id(), name, take_over)


def owner_of(label: Any) -> Owner | None:
    """Return whose weights a label names; None where it is none of ours, as before any weights came."""
    fields = label.split(":") if isinstance(label, str) else []
    return Owner(fields[1], fields[2], unquote(fields[3])) if len(fields) == 4 else None


def check_owner(label: Any, owner: Owner) -> None:
    """Check that a server's weights, if it has any, are from this owner.

    Raises:
        ServerTaken: they are from another one.
    """
    holder = owner_of(label)
    if holder is not None and holder.session != owner.session:
        same = ", another process of this same run" if holder.run == owner.run else ""
        raise ServerTaken(holder.name + same)
