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
import threading
from pathlib import Path
from typing import Any

import torch

from hwgrpo.rollout.local.engine import LocalEngine, score
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import TOKEN_VARIABLE
from hwgrpo.values import Prompt, PromptBatch, Sampling
from tests.support.processes.launch import ROOT
from tests.support.servers.fake_server import FakeServer, scored


class LocalServer(FakeServer):
    """Replies with samples of a model, which needs weights first.

    Attributes:
        stuck: prompts' texts that it does not answer while they are here.

    Args:
        folder: of the model.
        port: where it listens.
        token: that requests must carry.
    """

    def __init__(self, folder: str, port: int, token: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.stuck: set[str] = set()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._engine = LocalEngine(
            self._model, self._tokenizer, device=torch.device("cpu"), compute_dtype=torch.float32, max_sequences=64
        )
        for parameter in self._model.parameters():
            torch.nn.init.zeros_(parameter)
        self._one_at_a_time = threading.Lock()
        super().__init__(port, token)

    def take(self, order: dict[str, Any]) -> None:
        with self._one_at_a_time:
            super().take(order)
            unknown = self._model.load_state_dict(self.weights, strict=False).unexpected_keys
            assert not unknown, unknown
            self._engine.update_weights(self.version)
        print(f"weights {self.version}", flush=True)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._hold()
        if "prompt_logprobs" in asked:
            with self._one_at_a_time:
                return scored(asked["prompt"], score(self._model, [asked["prompt"]])[0])
        text = self._tokenizer.decode(asked["prompt"])
        while text in self.stuck and not self.released.wait(0.05):
            pass
        prompt = Prompt(uid="", text="", token_ids=tuple(asked["prompt"]), ground_truth=None, columns={})
        sampling = Sampling(
            n=asked["n"],
            max_response_tokens=asked["max_tokens"],
            temperature=asked["temperature"] or 1.0,
            greedy=not asked["temperature"],
            stop_token_ids=tuple(asked["stop_token_ids"]),
            seed=asked["seed"],
        )
        with self._one_at_a_time:
            found = self._engine.generate(PromptBatch((prompt,)), sampling)
        choices = []
        for index, (first, end) in enumerate(zip(found.offsets[:-1], found.offsets[1:], strict=True)):
            choices.append(
                {
                    "index": index,
                    "token_ids": found.tokens[first:end].tolist(),
                    "logprobs": {"token_logprobs": found.logprobs[first:end].tolist()},
                    "finish_reason": "stop" if found.finished[index] else "length",
                }
            )
        return {"choices": choices}

    def _hold(self) -> None:
        file = os.environ.get("HOLD_FILE")
        if file and len(self.asked) >= int(os.environ["HOLD_AT"]) and not Path(file).exists():
            written = Path(f"{file}.{os.getpid()}")
            written.write_text(str(os.getpid()))
            written.rename(file)
            self.released.wait()


def program(folder: Path) -> Path:
    """Write the program that replaces vLLM's Python; return it."""
    path = os.pathsep.join(str(ROOT / part) for part in (".", "backends", "kernels"))
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
