"""A rollout server without a model: it replies like vLLM with this project's plugin, and misbehaves on demand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import PROTOCOL
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.checksum import ChecksumError
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.guard import OwnerLease
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.worker import read_weights

PLUGIN = Path(__file__).parents[3] / "hwgrpo/rollout/vllm_plugin"
TOKEN = "only-the-test-knows"


class FakeWorkers:
    """Processes that have this project's plugin and no model."""

    def __init__(self, count: int) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self.files = [Path(self._scratch.name) / f"{rank}.safetensors" for rank in range(count)]
        script = Path(__file__).with_name("fake_group_worker.py")
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(file)],
                env={**os.environ, "PYTHONPATH": str(PLUGIN), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, file in enumerate(self.files)
        ]
        self._one_call = threading.Lock()
        self.call("set_fails", False)  # they are there

    @property
    def count(self) -> int:
        return len(self.files)

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of every worker.

        Raises:
            RuntimeError: it failed on one of them.
        """
        with self._one_call:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps([method, arguments]) + "\n")
                process.stdin.flush()
            told = [json.loads(each.stdout.readline() or '"it died"') for each in self._processes if each.stdout]
        problem = next((each for each in told if each), None)
        if problem:
            raise RuntimeError(problem)

    def weights(self) -> dict[str, Any]:
        """Return what they have received."""
        return in_files(self.files)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._scratch.cleanup()


class _HttpServer(ThreadingHTTPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 128  # connections beyond it are tried again by the client's kernel after a second


class FakeServer:
    """Serves on loopback.

    Attributes:
        faults: taken off one by one by requests for samples: "hang", "drop" (the connection), "not json", "large",
            "drip", "status 500", or a function that changes a good answer, or
            returns the bytes of another.
        refusals: HTTP statuses that the next requests with the right token get, whatever they are for.
        turned_away: names of trainers that have been refused.
        holder: the trainer that it belongs to, as the plugin keeps it.
        offer: what it tells of a process group with its workers.
        protocol: version of the protocol that it has; None: one that is older than the versions.
        damage: called with the folder of weights before they are read; may return another one, which is read.

    Args:
        port: 0 takes a free one.
        token: that requests must carry.
        workers: `FakeWorkers` or the like, which receive weights through a group; they outlive the server.
    """

    def __init__(self, port: int = 0, token: str = TOKEN, workers: Any = None) -> None:
        self.token = token
        self.workers = workers
        self.offer: dict[str, Any] = {"library": "gloo", "workers": workers.count} if workers else {}
        self.protocol: int | None = PROTOCOL
        self.damage: Callable[[Path], Any] = lambda folder: None
        self.group: str | None = None
        self.receive = "hwgrpo_receive_weights"
        self.faults: list[str | Callable[[Any], Any]] = []
        self.refusals: list[int] = []
        self.turned_away: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.taken: list[int] = []
        self.slept: list[int] = []
        self.can_sleep = True
        self.weights: dict[str, Any] = {}
        self.label = "-1"
        self.holder = OwnerLease()
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._handle(self)

            def do_POST(self) -> None:
                outer._handle(self)

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = _HttpServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Version of the weights that it has; -1 without any."""
        return int(self.label.split(":")[0])

    @version.setter
    def version(self, version: int) -> None:
        """Have it say that its weights are another version, of the same trainer."""
        rest = self.label.partition(":")[2]
        self.label = "-1" if version < 0 else f"{version}:{rest}"

    def close(self) -> None:
        """Stop listening; what hangs is let go."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def take(self, order: dict[str, Any]) -> None:
        """Take the weights of a folder, or those that the workers have received."""
        if "folder" in order:
            folder = Path(order["folder"])
            damaged = self.damage(folder)
            self.weights = dict(read_weights(str(damaged if isinstance(damaged, Path) else folder)))
        else:
            self.weights = self.workers.weights()
        self.label = order["version"]
        self.taken.append(self.version)

    def answer(self, asked: dict[str, Any]) -> Any:
        """Return what a request for samples is answered with."""
        return good(asked)

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _send(request, 401, b"{}")
        self.holder.hear(request.headers.get("x-hwgrpo-owner") or "")
        if self.refusals:
            return _send(request, self.refusals.pop(0), b"not now")
        if request.path == "/health":
            return _send(request, 200, b"")
        if request.path == "/v1/models":
            return _send(request, 200, json.dumps({"data": [{"id": "fake"}]}).encode())
        if request.path == "/hwgrpo/weights":
            return self._weights(request, json.loads(body or b"{}"))
        if request.path == "/hwgrpo/group" and self.workers is not None:
            order = json.loads(body)
            if self._refused(request, order.pop("owner")):
                return None
            if self._work(request, order["name"], lambda: self.workers.call("hwgrpo_join_group", order)):
                _send(request, 200, json.dumps({"group": self.group}).encode())
            return None
        if request.path != "/v1/completions":
            return _send(request, 404, b"nothing here")
        asked = json.loads(body)
        self.asked.append(asked)
        fault = self.faults.pop(0) if self.faults else None
        return self._misbehave(request, asked, fault)

    def _weights(self, request: BaseHTTPRequestHandler, order: dict[str, Any]) -> None:
        if request.command != "POST":
            told = {"version": self.label, "group": self.group, "can_sleep": self.can_sleep, **self.offer}
            told |= {"protocol": self.protocol} if self.protocol else {}
            return _send(request, 200, json.dumps(told).encode())
        if order.get("release"):
            self.holder.release(order["owner"]["session"])
            return _send(request, 200, b"{}")
        if self._refused(request, order["owner"]):
            return None
        if "sleep" in order:
            self.slept.append(order["sleep"])
        if "version" not in order:
            return _send(request, 200, b"{}")
        receive = "transfer" in order
        if receive and not self._work(request, self.group, lambda: self.workers.call(self.receive, order["transfer"])):
            self.version = -1
            return None
        try:
            self.take(order)
        except ChecksumError as error:
            self.version = -1
            return _send(request, 500, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return _send(request, 200, json.dumps({"version": self.label}).encode())

    def _refused(self, request: BaseHTTPRequestHandler, owner: dict[str, Any]) -> bool:
        """Claim the server for a trainer; reply with an error if another one owns it."""
        holder = self.holder.claim(owner)
        if holder is not None:
            self.turned_away.append(owner["name"])
            _send(request, 409, json.dumps({"holder": holder}).encode())
        return holder is not None

    def _work(self, request: BaseHTTPRequestHandler, group: str | None, work: Callable[[], None]) -> bool:
        """Call the workers of a group; reply if the call fails or is the last one."""
        try:
            work()
        except RuntimeError as error:
            self.group = None
            _send(request, 500, json.dumps({"error": str(error)}).encode())
            return False
        self.group = group
        return True

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
            str(fault), b"" if isinstance(answer, bytes) else json.dumps(answer).encode()
        )
        if isinstance(answer, bytes):
            text = answer
        _send(request, 500 if fault == "status 500" else 200, text, version=self.label)


def in_files(files: list[Path]) -> dict[str, Any]:
    """Return the tensors of safetensors files."""
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def sample(index: int, most: int) -> tuple[list[int], list[float]]:
    """Return tokens and log-probs: sample i has the tokens 5 + i, 6 + i, ..., as many as i + 1 and at most `most`."""
    tokens = [5 + index + k for k in range(min(index + 1, most))]
    return tokens, [-0.5 - k for k in range(len(tokens))]


def good(asked: dict[str, Any]) -> dict[str, Any]:
    """Return a reply to /v1/completions."""
    choices = []
    for index in range(asked["n"]):
        tokens, logprobs = sample(index, asked["max_tokens"])
        choices.append(
            {
                "index": index,
                "token_ids": tokens,
                "logprobs": {"token_logprobs": logprobs},
                "finish_reason": "length",
            }
        )
    return {"choices": choices[::-1]}


def scored(tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
    """Return a reply to /v1/completions with the log-probs of a prompt's tokens after the first."""
    entries = [{str(token): {"logprob": value}} for token, value in zip(tokens[1:], logprobs, strict=True)]
    return {"choices": [{"index": 0, "prompt_logprobs": [None, *entries]}]}


def _send(request: BaseHTTPRequestHandler, status: int, text: bytes, version: str | None = None) -> None:
    request.send_response(status)
    request.send_header("Content-Length", str(len(text)))
    if version is not None:
        request.send_header("x-hwgrpo-weight-version", version)
    with suppress(ConnectionError):  # who asked has given up
        request.end_headers()
        request.wfile.write(text)


def come_back(server: FakeServer, after: float) -> tuple[threading.Thread, list[FakeServer]]:
    """Stop a server, and start one without weights on the same port some time later."""
    server.close()
    back: list[FakeServer] = []

    def start() -> None:
        time.sleep(after)
        back.append(type(server)(server.port))

    thread = threading.Thread(target=start)
    thread.start()
    return thread, back
