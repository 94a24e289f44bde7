"""`local_server` in a process of its own that runs go to by its address, and that takes weights through a group, too.

A sample depends on the prompt, the seed of the request and the weights alone, so that runs of the same policy get the
same responses, however they are started.

python model_server.py MODEL; it says its port, and ends with its standard input. `served` starts one. With DIE_AT in
the environment it is gone when it gets that request for samples.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hwgrpo.models.loading import resolve_model_path
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import WorkerExtension
from tests.support.servers.fake_server import TOKEN, _send
from tests.support.servers.local_server import LocalServer


class ModelServer(LocalServer):
    """Serves the model at `path`; it is its own worker.

    Attributes:
        ways: how weights came, "folder" or "group", one for each version; asking for /ways empties it.
    """

    def __init__(self, path: str) -> None:
        self.ways: list[str] = []
        super().__init__(resolve_model_path(path), 0, TOKEN)
        self.workers = OwnWorker()
        self.offer = {"library": "gloo", "workers": 1}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if len(self.asked) == int(os.environ.get("DIE_AT", "0")):
            os._exit(9)
        return super().answer(asked)

    def take(self, order: dict[str, Any]) -> None:
        super().take(order)
        self.ways.append("group" if "transfer" in order else "folder")

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        if request.path == "/ways":
            ways, self.ways = self.ways, []
            return _send(request, 200, json.dumps(ways).encode())
        if request.path == "/stuck":
            self.stuck = set(json.loads(request.rfile.read(int(request.headers["Content-Length"]))))
            return _send(request, 200, b"")
        return super()._handle(request)


class OwnWorker(WorkerExtension):
    """What vLLM's worker has that the plugin uses, in the server's own process."""

    rank, device = 0, torch.device("cpu")

    def __init__(self) -> None:
        self._weights: dict[str, torch.Tensor] = {}
        self.model_runner = SimpleNamespace(reload_weights=self._reload, get_model=torch.nn.Module)

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of the plugin's."""
        getattr(self, method)(*arguments)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what was received."""
        return self._weights

    def _reload(self, weights_iterator: Any) -> None:
        self._weights = dict(weights_iterator)


class Address:
    """A model server in a process of its own."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ways(self) -> list[str]:
        """Return the transfers of weights since the last call."""
        with urllib.request.urlopen(f"{self.url}/ways", timeout=30) as answer:
            return json.load(answer)

    def stick(self, *texts: str) -> None:
        """Leave prompts of these texts without an answer, and no others."""
        with urllib.request.urlopen(f"{self.url}/stuck", json.dumps(texts).encode(), timeout=30):
            pass


@contextmanager
def served(model: str, **variables: str) -> Iterator[Address]:
    """Run a server of a model; its token is `fake_server.TOKEN`, and it has further variables."""
    root = Path(__file__).resolve().parents[3]
    path = os.pathsep.join(str(root / folder) for folder in (".", "backends", "kernels"))
    process = subprocess.Popen(
        [sys.executable, __file__, model],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = next(line for line in process.stdout if line.startswith("port ")).split()[1]
        yield Address(int(port))
    finally:
        process.stdin.close()
        process.wait(60)


if __name__ == "__main__":
    print(f"port {ModelServer(sys.argv[1]).port}", flush=True)
    sys.stdin.read()
