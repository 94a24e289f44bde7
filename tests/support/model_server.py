"""A rollout server in the place of vLLM's that does have a model: it samples on the CPU with whatever weights it gets.

A sample depends on the prompt, the seed of the request and the weights alone, so that runs of the same policy get the
same responses, however they are started. Weights come through a folder or through a process group.

python model_server.py MODEL; it says its port, and ends with its standard input. `served` starts one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fake_server import TOKEN, FakeServer, _send

from hwgrpo.config.schema import ModelConfig
from hwgrpo.models.loading import load_model, load_tokenizer
from hwgrpo.rollout.engine import Sampling
from hwgrpo.rollout.local import LocalEngine
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import WorkerExtension
from hwgrpo.values import Prompt, PromptBatch


class ModelServer(FakeServer):
    """Serves the model at `path`, as a worker of its own.

    Attributes:
        ways: how weights came, "folder" or "group", one for each version; asking for /ways empties it.
    """

    def __init__(self, path: str, port: int = 0, token: str = TOKEN) -> None:
        config = ModelConfig(path=path)
        self._model = load_model(config, attention="sdpa").float().eval()
        self._tokenizer = load_tokenizer(config)
        self._lock = threading.Lock()
        self._worker = _Worker(self._take)
        self.ways: list[str] = []
        super().__init__(port, token)
        self.offer = {"library": "gloo", "workers": 1}

    def answer(self, asked: dict[str, Any]) -> Any:
        # the seed takes the place of the prompt's name, which with the run's seed has made it
        prompt = Prompt(str(asked["seed"]), "", tuple(asked["prompt"]), None, {})
        kept = {name: asked[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        greedy = kept["temperature"] == 0
        sampling = Sampling(
            n=asked["n"],
            max_response_tokens=asked["max_tokens"],
            stop=tuple(asked["stop"]),
            stop_token_ids=tuple(asked["stop_token_ids"]),
            **({"greedy": True} if greedy else kept),
        )
        with self._lock, torch.no_grad():
            engine = LocalEngine(
                self._model,
                self._tokenizer,
                device=torch.device("cpu"),
                compute_dtype=torch.float32,
                max_sequences=64,
            )
            found = engine.generate(PromptBatch((prompt,)), sampling)
        choices = []
        for index, (start, end) in enumerate(zip(found.offsets[:-1], found.offsets[1:], strict=True)):
            choices.append(
                {
                    "index": index,
                    "token_ids": found.tokens[start:end].tolist(),
                    "logprobs": {"token_logprobs": found.logprobs[start:end].tolist()},
                    "finish_reason": "stop" if found.finished[index] else "length",
                }
            )
        return {"choices": choices}

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        if request.path == "/ways":
            ways, self.ways = self.ways, []
            return _send(request, 200, json.dumps(ways).encode())
        allowed = request.headers.get("Authorization") == f"Bearer {self.token}"
        if allowed and request.command == "POST" and request.path.startswith("/hwgrpo/"):
            order = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
            return self._order(request, order)
        return super()._handle(request)

    def _order(self, request: BaseHTTPRequestHandler, order: dict[str, Any]) -> None:
        if request.path == "/hwgrpo/group":
            self._worker.hwgrpo_join_group(order)
            self.group = order["name"]
            return _send(request, 200, json.dumps({"group": self.group}).encode())
        with self._lock:
            if "transfer" in order:
                self._worker.hwgrpo_receive_weights(order["transfer"])
            else:
                self._worker.hwgrpo_load_weights(order["folder"])
            self.version = order["version"]
        self.ways.append("group" if "transfer" in order else "folder")
        return _send(request, 200, json.dumps({"version": self.version}).encode())

    @torch.no_grad()
    def _take(self, weights_iterator: Any) -> None:
        own = self._model.state_dict()
        for name, weight in weights_iterator:
            own[name].copy_(weight)


class _Worker(WorkerExtension):
    """What vLLM's worker has that the plugin uses."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, take: Any) -> None:
        self.model_runner = SimpleNamespace(reload_weights=take, get_model=torch.nn.Module)


class Address:
    """A model server in a process of its own."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ways(self) -> list[str]:
        """Return how weights came since this was asked last."""
        with urllib.request.urlopen(f"{self.url}/ways", timeout=30) as answer:
            return json.load(answer)


@contextmanager
def served(model: str) -> Iterator[Address]:
    """Run a server of a model; its token is `fake_server.TOKEN`."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(str(root / folder) for folder in (".", "backends", "kernels", "tests/support"))
    process = subprocess.Popen(
        [sys.executable, __file__, model],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
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
