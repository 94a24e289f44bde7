"""Asking a rollout server over HTTP: with a token, with limits on time and size, telling apart what can go wrong."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from hwgrpo.errors import RunError
from hwgrpo.text import hide_secrets, remember_secrets

PIECE = 1 << 16
SHOWN = 300
"""Characters of an answer that an error shows."""


class ServerProblem(Exception):
    """The server did not answer as it should; another try may help. The message says what happened, without secrets."""

    def __init__(self, message: str) -> None:
        super().__init__(hide_secrets(message))  # it may quote a server that echoes what it was sent


class Unreachable(ServerProblem):
    """Nothing answers at that address, or the connection broke."""


class Hanging(ServerProblem):
    """No complete answer came in time."""


class Garbage(ServerProblem):
    """What came is not an answer."""


class Refused(ServerProblem):
    """The server refuses the token, or does not know the path; a proxy before one that starts does so for a while."""


class ServerTaken(RunError):
    """The server belongs to another run, or to another process of this one; no other try helps.

    Args:
        holder: whose it is.
    """

    def __init__(self, holder: str) -> None:
        super().__init__(
            f"the rollout server belongs to another run now: {holder}. Responses that its weights sampled are not "
            "used. End one of the two runs, or give each a server of its own; then start this one again from its "
            "newest checkpoint"
        )
        self.holder = holder


class Client:
    """Speaks with one server; may be used by several threads.

    Args:
        url: the server's address, http:// or https://.
        token: sent with every request; it appears in no message.
        largest: bytes of the largest answer that is read.
        headers: sent with every request, too.
    """

    def __init__(self, url: str, token: str, largest: int, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self.token = token
        remember_secrets([token])
        self._shown_url = hide_secrets(self.url)
        self._parts = urlsplit(self.url)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", **(headers or {})}
        self._largest = largest
        self._running: set[_Limit] = set()

    def break_off(self) -> None:
        """End the requests that are under way; those who wait for them see a broken connection."""
        for limit in list(self._running):
            limit.end(reached=False)

    def ask(self, method: str, path: str, body: Any = None, *, timeout: float) -> tuple[Any, Mapping[str, str]]:
        """Send a request and return the answer's JSON and its headers, their names in lower case.

        Args:
            method: "GET" or "POST".
            path: below the server's address.
            body: what is sent as JSON; None sends nothing.
            timeout: seconds that the call may take, from connecting to the last byte.

        Raises:
            ServerProblem: there was no response in time, or an invalid one.
            ServerTaken: the server refuses, since it belongs to another run.
        """
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=timeout)
        data = None if body is None else json.dumps(body).encode()
        limit = _Limit(timeout)
        try:
            self._running.add(limit)
            with limit.running(connection):
                connection.request(method, self._parts.path + path, body=data, headers=self._headers)
                response = connection.getresponse()
                text = self._read(response, path)
        except (OSError, http.client.HTTPException, ServerProblem) as error:
            if limit.reached or isinstance(error, TimeoutError):
                raise Hanging(f"{path}: no complete response within {timeout:g} s") from error
            if isinstance(error, ServerProblem):
                raise
            raise Unreachable(f"{path}: {type(error).__name__}: {error}") from error
        finally:
            self._running.discard(limit)
            connection.close()
        if limit.ended:  # what has come may be a part only, which an ended connection does not show
            raise Hanging(f"{path}: no complete response within {timeout:g} s")
        self._check_status(response.status, path, text)
        headers = {name.lower(): value for name, value in response.getheaders()}
        if not text:
            return None, headers
        try:
            return json.loads(text), headers
        except (ValueError, RecursionError) as error:
            raise Garbage(f"{path}: the response is not JSON that can be read: {_shown(text)}") from error

    def _read(self, response: http.client.HTTPResponse, path: str) -> bytes:
        pieces, size = [], 0
        largest = f"larger than {self._largest / 2**20:g} MiB (rollout.server.max_reply_mb)"
        if (response.length or 0) > self._largest:
            raise Garbage(f"{path}: the response is {largest}")
        while piece := response.read1(PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > self._largest:
                raise Garbage(f"{path}: the response is {largest}")
        if response.length:  # read1 does not complain, as read does
            raise Unreachable(f"{path}: the connection ended {response.length} bytes before the response did")
        return b"".join(pieces)

    def _check_status(self, status: int, path: str, text: bytes) -> None:
        if status == 200:
            return
        if status in (401, 403):
            raise Refused(
                f"the rollout server at {self._shown_url} refuses the token (HTTP {status}); "
                "rollout.server.token_variable names the environment variable that holds it, and the server must be "
                "given the same one"
            )
        if status == 404:
            raise Refused(f"the server at {self._shown_url} does not know {path} (HTTP 404): {_shown(text)}")
        if status == 409:
            raise ServerTaken(_holder(text))
        raise Garbage(f"{path}: HTTP {status}: {_shown(text)}")


class _Limit:
    """Ends a connection when its time is over, wherever in it that is: a socket's own limit starts with every byte."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.ended = False
        self.reached = False

    @contextmanager
    def running(self, connection: http.client.HTTPConnection) -> Iterator[None]:
        """Connect, and run the block for as long as the connection may live."""
        timer = threading.Timer(self._seconds, self.end)
        timer.daemon = True
        timer.start()
        try:
            connection.connect()
            with self._lock:
                self._socket = connection.sock
                if self.ended:
                    raise ConnectionAbortedError("the request was broken off")
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._socket = None

    def end(self, *, reached: bool = True) -> None:
        """End the connection, because its time is over or for another reason."""
        with self._lock:
            self.ended = True
            self.reached = self.reached or reached
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


def _holder(text: bytes) -> str:
    """Return what a refusal says of whose the server is."""
    try:
        said = json.loads(text)
        return hide_secrets(str(said["holder"]))
    except (ValueError, RecursionError, KeyError, TypeError):
        return _shown(text)


def _shown(text: bytes) -> str:
    beginning = text[:PIECE].decode(errors="replace")  # far more than is shown: half a secret would not be found
    return repr(hide_secrets(beginning)[:SHOWN])
