"""Asking a rollout server over HTTP: with a token, with limits on time and size, telling apart what can go wrong."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from hwgrpo.errors import ConfigError
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


class Client:
    """Speaks with one server; may be used by several threads.

    Args:
        url: the server's address, http:// or https://.
        token: sent with every request; it appears in no message.
        largest: bytes of the largest answer that is read.
    """

    def __init__(self, url: str, token: str, largest: int) -> None:
        self.url = url.rstrip("/")
        self.token = token
        remember_secrets([token])
        self._shown_url = hide_secrets(self.url)
        self._parts = urlsplit(self.url)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._largest = largest

    def ask(self, method: str, path: str, body: Any = None, *, timeout: float) -> tuple[Any, Mapping[str, str]]:
        """Send a request and return the answer's JSON and its headers, their names in lower case.

        Args:
            method: "GET" or "POST".
            path: below the server's address.
            body: what is sent as JSON; None sends nothing.
            timeout: seconds in which the whole answer must have come.

        Raises:
            ServerProblem: there was no answer, or one that is none.
            ConfigError: the server refuses the token or does not know the path.
        """
        end = time.monotonic() + timeout
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._parts.path + path, body=data, headers=self._headers)
            response = connection.getresponse()
            text = self._read(connection, response, path, end)
        except TimeoutError as error:
            raise Hanging(f"{path}: no answer within {timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        self._check_status(response.status, path, text)
        headers = {name.lower(): value for name, value in response.getheaders()}
        if not text:
            return None, headers
        try:
            return json.loads(text), headers
        except ValueError as error:
            raise Garbage(f"{path}: the answer is not JSON: {_shown(text)}") from error

    def _read(self, connection: Any, response: http.client.HTTPResponse, path: str, end: float) -> bytes:
        """Read an answer that may drip: a socket's timeout alone begins anew with every byte."""
        pieces, size = [], 0
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if connection.sock is not None:
                connection.sock.settimeout(left)
            piece = response.read1(PIECE)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
            size += len(piece)
            if size > self._largest:
                raise Garbage(
                    f"{path}: the answer is larger than {self._largest / 2**20:g} MiB (rollout.server.max_reply_mb)"
                )

    def _check_status(self, status: int, path: str, text: bytes) -> None:
        if status == 200:
            return
        if status in (401, 403):
            raise ConfigError(
                f"the rollout server at {self._shown_url} refuses the token (HTTP {status}); "
                "rollout.server.token_variable names the environment variable that holds it, and the server must be "
                "given the same one"
            )
        if status == 404:
            raise ConfigError(f"the server at {self._shown_url} does not know {path} (HTTP 404): {_shown(text)}")
        raise Garbage(f"{path}: HTTP {status}: {_shown(text)}")


def _shown(text: bytes) -> str:
    beginning = text[:PIECE].decode(errors="replace")  # far more than is shown: half a secret would not be found
    return repr(hide_secrets(beginning)[:SHOWN])
