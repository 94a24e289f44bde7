"""A loopback server of rewards that replies as a test says: slowly, wrongly, not at all, or in another order."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Asked:
    """A request that arrived."""

    path: str
    headers: dict[str, str]
    body: Any
    time: float


@dataclass
class Say:
    """A reply: a status, headers, and JSON or bytes as they are."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Drop:
    """Ends the connection without a reply."""


class Half:
    """Ends the connection in the middle of a reply."""


class Hang:
    """Never replies."""


class RewardServer:
    """Serves on loopback.

    Attributes:
        url: its address.
        asked: the requests, in the order of their arrival.

    Args:
        reply: called with each request and its number; returns `Say`, `Drop`, `Half`, `Hang`, or JSON.
    """

    def __init__(self, reply: Callable[[Asked, int], Any]) -> None:
        self.asked: list[Asked] = []
        self.in_flight = self.most_in_flight = 0
        self.over = threading.Event()
        self._reply, self._lock = reply, threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer._handle(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = Asked(request.path, headers, body, time.monotonic())
        with self._lock:
            number = len(self.asked)
            self.asked.append(asked)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            said = self._reply(asked, number)
        finally:
            with self._lock:
                self.in_flight -= 1
        request.close_connection = True
        if said is Hang:
            self.over.wait(120)
            return
        if said is Drop:
            return
        say = said if isinstance(said, Say) else Say({"half": "x" * 100}) if said is Half else Say(said)
        data = _encoded(say.body)
        request.send_response(say.status)
        for name, value in {**say.headers, "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data[:20] if said is Half else data)


def _encoded(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


@contextmanager
def rewards_by(reply: Callable[[Asked, int], Any]) -> Iterator[RewardServer]:
    """Serve while the block runs."""
    server = RewardServer(reply)
    try:
        yield server
    finally:
        server.close()
