"""A rollout server without a model: it answers as vLLM with this project's plugin does, and misbehaves on demand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

TOKEN = "only-the-test-knows"


class FakeServer:
    """Serves on loopback.

    Attributes:
        faults: taken off one by one by requests for samples: "hang", "drop" (the connection), "not json", "large",
            "drip", "status 500", or a function that changes a good answer.
    """

    def __init__(self, port: int = 0, token: str = TOKEN) -> None:
        self.token = token
        self.faults: list[str | Callable[[Any], Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.taken: list[int] = []
        self.weights: dict[str, Any] = {}
        self.version = -1
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._handle(self)

            def do_POST(self) -> None:
                outer._handle(self)

            def log_message(self, format: str, *args: Any) -> None:
                return

        ThreadingHTTPServer.allow_reuse_address = True
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; what hangs is let go."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def take(self, order: dict[str, Any]) -> None:
        """Take the weights of a folder."""
        files = sorted(Path(order["folder"]).glob("*.safetensors"))
        self.weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self.version = order["version"]
        self.taken.append(self.version)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return what a request for samples is answered with."""
        return good(asked)

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _send(request, 401, b"{}")
        if request.path == "/health":
            return _send(request, 200, b"")
        if request.path == "/v1/models":
            return _send(request, 200, json.dumps({"data": [{"id": "fake"}]}).encode())
        if request.path == "/hwgrpo/weights":
            if request.command == "POST":
                self.take(json.loads(body))
            return _send(request, 200, json.dumps({"version": self.version}).encode())
        if request.path != "/v1/completions":
            return _send(request, 404, b"nothing here")
        asked = json.loads(body)
        self.asked.append(asked)
        fault = self.faults.pop(0) if self.faults else None
        return self._misbehave(request, asked, fault)

    def _misbehave(self, request: BaseHTTPRequestHandler, asked: dict[str, Any], fault: Any) -> None:
        answer: Any = self.answer(asked)
        if fault == "hang":
            self.released.wait(30)
            return
        if fault == "drop":
            request.connection.close()
            return
        if fault == "drip":
            request.send_response(200)
            request.end_headers()
            while not self.released.wait(0.1):
                try:
                    request.wfile.write(b" ")
                    request.wfile.flush()
                except OSError:
                    return
            return
        if fault == "forget":
            self.version = -1
        if callable(fault):
            answer = fault(answer)
        text = {"not json": b"<html>busy</html>", "large": b" " * (3 << 20)}.get(
            str(fault), json.dumps(answer).encode()
        )
        _send(request, 500 if fault == "status 500" else 200, text, version=str(self.version))


def good(asked: dict[str, Any]) -> dict[str, Any]:
    """Return an answer: sample i has the tokens 5, 6, ..., as many as i + 1 and at most as are asked for."""
    choices = []
    for index in range(asked["n"]):
        tokens = [5 + index + k for k in range(min(index + 1, asked["max_tokens"]))]
        logprobs = [-0.5 - k for k in range(len(tokens))]
        choices.append(
            {
                "index": index,
                "token_ids": tokens,
                "logprobs": {"token_logprobs": logprobs},
                "finish_reason": "length",
            }
        )
    return {"choices": choices[::-1]}


def _send(request: BaseHTTPRequestHandler, status: int, text: bytes, version: str | None = None) -> None:
    request.send_response(status)
    request.send_header("Content-Length", str(len(text)))
    if version is not None:
        request.send_header("x-hwgrpo-weight-version", version)
    request.end_headers()
    request.wfile.write(text)


def come_back(server: FakeServer, after: float) -> tuple[threading.Thread, list[FakeServer]]:
    """Stop a server, and start one without weights on the same port some time later."""
    server.close()
    back: list[FakeServer] = []

    def start() -> None:
        time.sleep(after)
        back.append(FakeServer(server.port))

    thread = threading.Thread(target=start)
    thread.start()
    return thread, back
