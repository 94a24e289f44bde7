"""A rollout server that looks like SGLang's, as its sources have it, and has no model.

Started by a file in place of `sglang.launch_server` it takes that one's arguments: `serve`.
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.support.servers.fake_server import FakeServer, _send, in_files, sample

TAKES = {
    "/generate": {"input_ids", "sampling_params", "return_logprob"},
    "/update_weights_from_disk": {"model_path", "load_format", "weight_version", "flush_cache"},
    "/update_weight_version": {"new_version", "abort_all_requests"},
    "/release_memory_occupation": set(),
    "/resume_memory_occupation": set(),
}
"""Route -> fields; what a request has beside them is refused."""
SAMPLING = {
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "stop",
    "stop_token_ids",
    "no_stop_trim",
    "skip_special_tokens",
    "sampling_seed",
}
ARGUMENTS = (
    *("model-path", "tokenizer-path", "revision", "dtype", "device", "load-format", "served-model-name"),
    *("sampling-defaults", "random-seed", "context-length", "max-running-requests", "mem-fraction-static"),
    *("tp-size", "host", "port", "api-key"),
)
SWITCHES = ("trust-remote-code", "disable-cuda-graph", "enable-memory-saver")


class FakeSglang(FakeServer):
    """See `FakeServer`; its faults work here, too.

    Attributes:
        events: what it was told beside requests for samples.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.events: list[str] = []
        super().__init__(*arguments, **settings)

    def answer(self, asked: dict[str, Any]) -> Any:
        made = []
        for index, (_, settings) in enumerate(zip(asked["input_ids"], asked["sampling_params"], strict=True)):
            tokens, logprobs = sample(index, settings["max_new_tokens"])
            told = {
                "finish_reason": {"type": "length", "length": len(tokens)},
                "weight_version": self.label,
                "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
            }
            made.append({"text": "", "output_ids": tokens, "meta_info": told})
        return made

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if request.path == "/health":
            return _send(request, 200, b"")
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _send(request, 401, b"{}")
        if request.path == "/model_info":
            label = self.label if self.label != "-1" else "default"
            info = {"model_path": "fake", "served_model_name": "fake", "weight_version": label}
            return _send(request, 200, json.dumps(info).encode())
        if request.path not in TAKES or request.command != "POST":
            return _send(request, 404, b"nothing here")
        asked = json.loads(body)
        unknown = asked.keys() - TAKES[request.path]
        for settings in asked.get("sampling_params", ()):
            unknown |= settings.keys() - SAMPLING
        if unknown:
            return _send(request, 400, f"unknown: {unknown}".encode())
        if request.path == "/generate":
            self.asked.append(asked)
            return self._misbehave(request, asked, self.faults.pop(0) if self.faults else None)
        self.events.append(request.path)
        if request.path == "/update_weights_from_disk":
            refused = {"weights": 400, "weights, politely": 200}.get(str(self.faults[0]) if self.faults else "")
            if refused:
                del self.faults[0]
                return _send(request, refused, json.dumps({"success": False, "message": "Rolling back"}).encode())
            self.weights = in_files(sorted(Path(asked["model_path"]).glob("*.safetensors")))
            self.label = asked["weight_version"]
            self.taken.append(self.version)
            return _send(request, 200, json.dumps({"success": True, "message": "", "num_paused_requests": 0}).encode())
        if request.path == "/release_memory_occupation":
            self.weights = {}
        if request.path == "/update_weight_version":
            self.label = asked["new_version"]
        return _send(request, 200, b"null")


def prepare_server_args(argv: list[str]) -> argparse.Namespace:
    """Read the arguments of the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ARGUMENTS:
        parser.add_argument(f"--{name}")
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(argv)


def serve(found: argparse.Namespace) -> None:
    """Serve until the process is ended."""
    print(f"serving {found.model_path}", flush=True)
    FakeSglang(int(found.port), found.api_key)
    threading.Event().wait()
