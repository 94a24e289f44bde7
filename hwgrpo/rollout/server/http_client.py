"""HTTP client of a rollout server, with a token, limits on time and size, and an exception per kind of failure."""

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

CHUNK_BYTES = 1 << 16
SHOWN_CHARS = 300
"""Characters of a response that an error shows."""


class ServerProblem(Exception):
    """A failed request that may be retried. The message has no secrets."""

    def __init__(self, message: str) -> None:
        super().__init__(hide_secrets(message))  # it may quote a server that echoes what it was sent


class Unreachable(ServerProblem):
    """Nothing listens at that address, or the connection broke."""


class TimedOut(ServerProblem):
    """No complete response arrived in time."""


class InvalidResponse(ServerProblem):
    """The response is not valid."""


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
        self._parts = urlsplit(self.url)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", **(headers or {})}
        self._largest = largest
        self._in_flight: set[_Deadline] = set()

    def abort_requests(self) -> None:
        """Abort the requests in flight; their callers see a broken connection."""
        for deadline in list(self._in_flight):
            deadline.end(reached=False)

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
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=timeout)
        data = None if body is None else json.dumps(body).encode()
        deadline = _Deadline(timeout)
        try:
            self._in_flight.add(deadline)
            with deadline.running(connection):
                connection.request(method, self._parts.path + path, body=data, headers=self._headers)
                response = connection.getresponse()
                text = self._read(response, path)
        except (OSError, http.client.HTTPException, ServerProblem) as error:
            if deadline.reached or isinstance(error, TimeoutError):
                raise TimedOut(f"{path}: no complete response within {timeout:g} s") from error
            if isinstance(error, ServerProblem):
                raise
            raise Unreachable(f"{path}: {type(error).__name__}: {error}") from error
        finally:
            self._in_flight.discard(deadline)
            connection.close()
        if deadline.reached:  # the response may be truncated, which an aborted connection does not show
            raise TimedOut(f"{path}: no complete response within {timeout:g} s")
        if deadline.ended:
            raise Unreachable(f"{path}: the request was aborted")
        self._check_status(response.status, path, text)
        headers = {name.lower(): value for name, value in response.getheaders()}
        if not text:
            return None, headers
        try:
            return json.loads(text), headers
        except (ValueError, RecursionError) as error:
            raise InvalidResponse(f"{path}: the response is not valid JSON: {_shown(text)}") from error

    def _read(self, response: http.client.HTTPResponse, path: str) -> bytes:
        chunks, size = [], 0
        largest = f"larger than {self._largest / 2**20:g} MiB (rollout.server.max_reply_mb)"
        if (response.length or 0) > self._largest:
            raise InvalidResponse(f"{path}: the response is {largest}")
        while chunk := response.read1(CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            if size > self._largest:
                raise InvalidResponse(f"{path}: the response is {largest}")
        if response.length:  # read1 does not raise, as read does
            raise Unreachable(f"{path}: the connection ended {response.length} bytes before the response did")
        return b"".join(chunks)

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
            raise RefusedByServer(f"the server at {self._shown_url} does not know {path} (HTTP 404): {_shown(text)}")
        if status == 409:
            raise ServerInUse(_holder(text))
        raise InvalidResponse(f"{path}: HTTP {status}: {_shown(text)}")


class _Deadline:
    """Deadline of a connection as a whole: a socket's own timeout restarts with every byte."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.ended = False
        self.reached = False

    @contextmanager
    def running(self, connection: http.client.HTTPConnection) -> Iterator[None]:
        """Connect and run the block; abort the connection at the deadline."""
        timer = threading.Timer(self._seconds, self.end)
        timer.daemon = True
        timer.start()
        try:
            connection.connect()
            with self._lock:
                self._socket = connection.sock
                if self.ended:
                    raise ConnectionAbortedError("the request was aborted")
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._socket = None

    def end(self, *, reached: bool = True) -> None:
        """Abort the connection, at the deadline or for another reason."""
        with self._lock:
            self.ended = True
            self.reached = self.reached or reached
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


def _holder(text: bytes) -> str:
    """Return the name of the server's owner in the body of an HTTP 409."""
    try:
        body = json.loads(text)
        return hide_secrets(str(body["holder"]))
    except (ValueError, RecursionError, KeyError, TypeError):
        return _shown(text)


def _shown(text: bytes) -> str:
    beginning = text[:CHUNK_BYTES].decode(errors="replace")  # far more than is shown: half a secret would not be hidden
    return repr(hide_secrets(beginning)[:SHOWN_CHARS])
