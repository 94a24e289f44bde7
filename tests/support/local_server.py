"""A rollout server with a model: the local engine behind what vLLM with this project's plugin speaks over HTTP.

It stands where the Python of vLLM's environment would (`rollout.server.python`), so that a run starts it, sends it
weights, and starts it again when it is gone, as it does with vLLM.

HOLD_FILE and HOLD_AT: in answering its request number HOLD_AT it writes its process id there and answers no more,
unless that file was there already.
"""

from __future__ import annotations

import argparse
import os
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from launch import ROOT
from model_server import ModelServer

from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import TOKEN_VARIABLE


class LocalServer(ModelServer):
    """Is of no use until it was given weights; see `ModelServer`."""

    def __init__(self, path: str, port: int, token: str) -> None:
        super().__init__(path, port, token)
        for parameter in self._model.parameters():
            torch.nn.init.zeros_(parameter)

    def answer(self, asked: dict[str, Any]) -> Any:
        self._hold()
        return super().answer(asked)

    def _order(self, request: BaseHTTPRequestHandler, order: dict[str, Any]) -> None:
        super()._order(request, order)
        print(f"weights {self.version}", flush=True)

    def _hold(self) -> None:
        file = os.environ.get("HOLD_FILE")
        if file and len(self.asked) >= int(os.environ["HOLD_AT"]) and not Path(file).exists():
            written = Path(f"{file}.{os.getpid()}")
            written.write_text(str(os.getpid()))
            written.rename(file)
            self.released.wait()


def program(folder: Path) -> Path:
    """Write what is started in place of vLLM's Python; return it."""
    path = os.pathsep.join(str(ROOT / part) for part in (".", "backends", "kernels", "tests/support"))
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} {__file__} "$@"\n')
    script.chmod(0o755)
    return script


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    settings, _ = parser.parse_known_args()
    LocalServer(settings.model, settings.port, os.environ[TOKEN_VARIABLE])
    sys.stdin.buffer.read()  # until the run that started it is gone
