"""Requests to a service at the same time: each is retried, and gets its reply or its error."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hwgrpo.errors import error_text
from hwgrpo.rewards.services.connection import MAX_REPLY_BYTES, Connection
from hwgrpo.rewards.services.pacing import RateLimit, backoff, retry_after
from hwgrpo.support.http_exchange import Exchange, ServerProblem, parse_json, shown_text
from hwgrpo.support.text import hide_secrets

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
"""Statuses that another attempt may change."""


POLL = 1.0
"""Most seconds until Ctrl-C is noticed that the system delivered to another thread."""


class ServiceError(Exception):
    """A service gave no valid reply. The message has no secrets."""

    def __init__(self, message: str) -> None:
        super().__init__(hide_secrets(message))


class InvalidReply(ServiceError):
    """A reply that is not what the reward reads; another attempt may give a valid one."""


@dataclass(frozen=True)
class Request:
    """One POST request."""

    path: str
    """Below the service's address."""
    body: Any
    """JSON-able."""
    read: Callable[[Any], Any]
    """Returns the result of a reply's JSON; raises `InvalidReply`."""


class Service:
    """Sends batches of requests to a service.

    Args:
        connection: how it is called.
        key: the reward's setting, for messages.
        rate: limit on requests per minute, retries included.
    """

    def __init__(self, connection: Connection, key: str, rate: RateLimit | None = None) -> None:
        self._connection, self._key = connection, key
        self._rate = rate or RateLimit(None)

    def call_all(self, requests: Sequence[Request]) -> list[Any]:
        """Return the result of each request, or its exception, in the order of the requests.

        Threads send them, and end with this call: Ctrl-C breaks off the requests in flight.
        """
        calls = _Calls(self._connection, self._key, self._rate, requests)
        return calls.run() if requests else []


class _Calls:
    """The requests of one batch."""

    def __init__(self, connection: Connection, key: str, rate: RateLimit, requests: Sequence[Request]) -> None:
        self._connection, self._rate, self._requests = connection, rate, requests
        headers = connection.headers(key)
        self._servers = [_Server(url, headers) for url in connection.url]
        self._lock = threading.Lock()
        self._stop, self._done = threading.Event(), threading.Event()
        self._numbers = iter(range(len(requests)))
        self._results: dict[int, Any] = {}

    def run(self) -> list[Any]:
        """Send the requests, wait for them, and return their results."""
        limit = self._connection.batch_timeout
        end = None if limit is None else time.monotonic() + limit
        try:
            for _ in range(min(self._connection.max_concurrency, len(self._requests))):
                threading.Thread(target=self._work, name="reward request", daemon=True).start()
            while not self._done.wait(POLL if end is None else min(POLL, max(0.0, end - time.monotonic()))):
                if end is not None and time.monotonic() >= end:
                    break
        finally:
            self._stop.set()
            for server in self._servers:
                server.exchange.close()
        with self._lock:
            results = dict(self._results)
        late = ServiceError(f"no valid reply within batch_timeout={limit} s")
        return [results.get(number, late) for number in range(len(self._requests))]

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            try:
                result = self._call(number)
            except Exception as error:
                result = error
            with self._lock:
                if not self._stop.is_set():
                    self._results[number] = result
                if len(self._results) == len(self._requests):
                    self._done.set()

    def _call(self, number: int) -> Any:
        """Return the result of one request; raise `ServiceError` after the last attempt."""
        request, limits = self._requests[number], self._connection
        identity = json.dumps([request.path, request.body], sort_keys=True).encode()
        for attempt in itertools.count():
            self._pause(self._rate.reserve(time.monotonic()))
            server = self._servers[(number + attempt) % len(self._servers)]
            asked = 0.0
            try:
                status, headers, text = server.post(request, limits.timeout)
                if status == 200:
                    return request.read(parse_json(text, server.shown))
                problem = f"{server.shown}: HTTP {status}: {shown_text(text)}"
                if status in (401, 403) and limits.api_key_variable is not None:
                    problem += f"; the key is that of the environment variable {limits.api_key_variable}"
                if status not in RETRIED:
                    raise ServiceError(problem)
                asked = retry_after(headers)
            except (ServerProblem, InvalidReply) as error:
                problem = error_text(error)
            if asked > limits.max_wait:
                raise ServiceError(f"{problem}; it asks to wait {asked:g} s, above max_wait={limits.max_wait:g}")
            if attempt == limits.retries:
                attempts = f"{attempt + 1} attempt{'s' if attempt else ''}"
                raise ServiceError(f"no valid reply in {attempts}, the last: {problem}")
            self._pause(max(asked, backoff(attempt, limits.backoff, limits.max_wait, identity)))
        raise AssertionError("unreachable")

    def _pause(self, seconds: float) -> None:
        if seconds > 0 and self._stop.wait(seconds):
            raise ServiceError("stopped")


class _Server:
    """One address."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self.exchange = Exchange(f"{parts.scheme}://{parts.netloc}", headers, MAX_REPLY_BYTES, "the limit")
        self._path, self._query = parts.path.rstrip("/"), f"?{parts.query}" if parts.query else ""
        self.shown = hide_secrets(url)

    def post(self, request: Request, timeout: float) -> tuple[int, Mapping[str, str], bytes]:
        path = self._path + request.path or "/"
        return self.exchange.send("POST", path + self._query, request.body, timeout=timeout)
