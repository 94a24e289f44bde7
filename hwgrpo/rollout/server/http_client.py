"""HTTP client of a rollout server: a token, and exceptions for a server that refuses it or belongs to another run."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from hwgrpo.errors import RunError
from hwgrpo.support.http_exchange import (
    SHOWN_CHARS,
    Cancellation,
    Exchange,
    InvalidResponse,
    ServerProblem,
    TimedOut,
    Unreachable,
    parse_json,
    shown_text,
)
from hwgrpo.support.text import hide_secrets, remember_secrets

__all__ = (
    "SHOWN_CHARS",
    "Cancellation",
    "Client",
    "InvalidResponse",
    "RefusedByServer",
    "ServerInUse",
    "ServerProblem",
    "TimedOut",
    "Unreachable",
)


class RefusedByServer(ServerProblem):
    """The server rejects the token or the path; the proxy of a starting server does so for a while."""


class ServerInUse(RunError):
    """The server belongs to another run, or to another process of this one; a retry cannot help.

    Args:
        holder: name of its owner.
    """

    def __init__(self, holder: str) -> None:
        super().__init__(
            f"the rollout server belongs to another run now: {holder}. Responses sampled with its weights are not "
            "used. End one of the two runs, or give each a server of its own; then start this one again from its "
            "newest checkpoint"
        )
        self.holder = holder


class Client:
    """HTTP client of one server; thread-safe.

    Args:
        url: the server's address, http:// or https://.
        token: sent with every request; it appears in no message.
        largest: limit on the size of a response, in bytes.
        headers: further headers of every request.
    """

    def __init__(self, url: str, token: str, largest: int, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self.token = token
        remember_secrets([token])
        self._shown_url = hide_secrets(self.url)
        headers = {"Authorization": f"Bearer {token}", **(headers or {})}
        self._exchange = Exchange(self.url, headers, largest, "rollout.server.max_reply_mb")
        self._cancellation: Cancellation | None = None

    def cancellable(self, cancellation: Cancellation) -> Client:
        """Return this client for requests that a cancellation ends; `abort_requests` ends them, too."""
        client = copy.copy(self)
        client._cancellation = cancellation
        return client

    def abort_requests(self) -> None:
        """Abort the requests in flight; their callers see a broken connection."""
        self._exchange.abort()

    def request(self, method: str, path: str, body: Any = None, *, timeout: float) -> tuple[Any, Mapping[str, str]]:
        """Send a request; return the response's JSON and its headers, with names in lower case.

        Args:
            method: "GET" or "POST".
            path: below the server's address.
            body: JSON-able body; None sends none.
            timeout: limit in seconds, from connecting to the last byte.

        Raises:
            ServerProblem: no response in time, or an invalid one.
            ServerInUse: the server belongs to another run.
        """
        status, headers, text = self._exchange.send(
            method, path, body, timeout=timeout, cancellation=self._cancellation
        )
        self._check_status(status, path, text)
        return parse_json(text, path) if text else None, headers

    def _check_status(self, status: int, path: str, text: bytes) -> None:
        if status == 200:
            return
        if status in (401, 403):
            raise RefusedByServer(
                f"the rollout server at {self._shown_url} refuses the token (HTTP {status}); "
                "rollout.server.token_variable names the environment variable that holds it, and the server must be "
                "given the same one"
            )
        if status == 404:
            shown = shown_text(text)
            raise RefusedByServer(f"the server at {self._shown_url} does not know {path} (HTTP 404): {shown}")
        if status == 409:
            raise ServerInUse(_holder(text))
        raise InvalidResponse(f"{path}: HTTP {status}: {shown_text(text)}")


def _holder(text: bytes) -> str:
    """Return the name of the server's owner in the body of an HTTP 409."""
    try:
        body = json.loads(text)
        return hide_secrets(str(body["holder"]))
    except (ValueError, RecursionError, KeyError, TypeError):
        return shown_text(text)
