"""One HTTP request with limits on time and size, and an exception per kind of failure."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit

from hwgrpo.support.text import hide_secrets

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


class Cancellation:
    """Ends the requests that are sent with it, from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: set[_Deadline] = set()
        self.requested = False
        """Whether `cancel` was called: later requests end at once, too."""

    def cancel(self) -> None:
        """Abort the requests in flight and all later ones; their callers see a broken connection."""
        with self._lock:
            self.requested = True
            for deadline in self._in_flight:
                deadline.end(reached=False)

    @contextmanager
    def covering(self, deadline: _Deadline) -> Iterator[None]:
        """Abort a request of the block when `cancel` is called."""
        with self._lock:
            self._in_flight.add(deadline)
            if self.requested:
                deadline.end(reached=False)
        try:
            yield
        finally:
            with self._lock:
                self._in_flight.discard(deadline)


class Exchange:
    """Requests to one server; thread-safe.

    Args:
        url: the server's address, http:// or https://.
        headers: of every request.
        largest: limit on the size of a response, in bytes.
        limit_name: name of the setting of that limit, for messages.
    """

    def __init__(self, url: str, headers: Mapping[str, str], largest: int, limit_name: str) -> None:
        self._parts = urlsplit(url.rstrip("/"))
        self._headers = {"Content-Type": "application/json", **headers}
        self._largest = largest
        self._too_large = f"larger than {largest / 2**20:g} MiB ({limit_name})"
        self.in_flight: set[_Deadline] = set()
        self._closed = False

    def abort(self) -> None:
        """Abort the requests in flight; their callers see a broken connection."""
        for deadline in list(self.in_flight):
            deadline.end(reached=False)

    def close(self) -> None:
        """Abort the requests in flight and all later ones."""
        self._closed = True
        self.abort()

    def send(
        self, method: str, path: str, body: Any = None, *, timeout: float, cancellation: Cancellation | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send a request; return the response's status, its headers with names in lower case, and its body.

        Args:
            method: "GET" or "POST".
            path: below the server's address.
            body: JSON-able body; None sends none.
            timeout: limit in seconds, from connecting to the last byte.
            cancellation: ends this request alone; None: only `abort` and `close` end it.

        Raises:
            ServerProblem: no complete response in time.
        """
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=timeout)
        data = None if body is None else json.dumps(body).encode()
        deadline = _Deadline(timeout)
        try:
            self.in_flight.add(deadline)
            if self._closed:
                deadline.end(reached=False)
            with cancellation.covering(deadline) if cancellation else nullcontext(), deadline.running(connection):
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
            self.in_flight.discard(deadline)
            connection.close()
        if deadline.reached:  # the response may be truncated, which an aborted connection does not show
            raise TimedOut(f"{path}: no complete response within {timeout:g} s")
        if deadline.ended:
            raise Unreachable(f"{path}: the request was aborted")
        return response.status, {name.lower(): value for name, value in response.getheaders()}, text

    def _read(self, response: http.client.HTTPResponse, path: str) -> bytes:
        chunks, size = [], 0
        if (response.length or 0) > self._largest:
            raise InvalidResponse(f"{path}: the response is {self._too_large}")
        while chunk := response.read1(CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            if size > self._largest:
                raise InvalidResponse(f"{path}: the response is {self._too_large}")
        if response.length:  # read1 does not raise, as read does
            raise Unreachable(f"{path}: the connection ended {response.length} bytes before the response did")
        return b"".join(chunks)


def parse_json(text: bytes, path: str) -> Any:
    """Return the JSON of a response's body; raise `InvalidResponse` if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidResponse(f"{path}: the response is not valid JSON: {shown_text(text)}") from error


def shown_text(text: bytes) -> str:
    """Return the beginning of a response's body for a message, without secrets."""
    beginning = text[:CHUNK_BYTES].decode(errors="replace")  # far more than is shown: half a secret would not be hidden
    return repr(hide_secrets(beginning)[:SHOWN_CHARS])


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
