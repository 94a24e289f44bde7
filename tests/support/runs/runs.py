"""Complete runs of a very small model, in this process or in a forked child that may be killed."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import hwgrpo_kernels.rows_torch  # noqa: F401  # what children would import, each anew
import peft  # noqa: F401
import torch
from hwgrpo_backends import Backend
from hwgrpo_backends.cpu import BACKEND

import hwgrpo.rollout.local.engine
import hwgrpo.training.strategies.single  # noqa: F401
from hwgrpo.config import Config, load_config
from hwgrpo.errors import RunFinished
from hwgrpo.support.jsonlines import read_lines
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.finish import finish
from hwgrpo.training.loop import Status, train
from hwgrpo.training.setup import build_run

SMALL = (
    "model.path=builtin://tiny?task=sort&hidden=32&layers=1&steps=30&batch=32&digits=3",
    "data.train=task://sort?digits=3",
    "data.validation_max_rows=8",
    "data.max_prompt_tokens=16",
    "rollout.n=4",
    "rollout.max_response_tokens=6",
    f"reward.functions=['{Path(__file__).parent}/dense_reward.py:share_right']",
    "optim.lr=1e-3",
    "trainer.prompts_per_step=4",
    "trainer.max_steps=6",
    "trainer.validation_n=2",
    "trainer.threads=1",
    "observe.loggers=[jsonl]",
    "observe.progress=none",
)
"""Overrides of a run that takes about a second."""
VALIDATING = ("data.validation_max_rows", "trainer.validation_n")
"""Those of them that a run on a file has no use for."""


def small(output: Path, *overrides: str) -> Config:
    """Return the settings of a small run."""
    return load_config(None, [*SMALL, f"trainer.output_dir={output}", *overrides], imported=VALIDATING)


def run(output: Path, *overrides: str, backend: Backend = BACKEND) -> Status | Literal["finished"]:
    """Train to the end in this process; print the command's message for a finished run."""
    try:
        parts = build_run(small(output, *overrides), backend, 0, 1)
    except RunFinished as finished:
        print(finished)
        return "finished"
    try:
        status = train(parts)
        finish(parts, status)
    finally:
        parts.close()
    return status


def forked(body: Callable[[], Any]) -> int:
    """Run `body` in a forked child and return its wait status: 0, an exit code, or minus the signal that killed it.

    Forking keeps the imports of the parent, so a hundred runs cost a hundred runs and not a hundred starts.
    """
    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def wait_for_checkpoint(output: Path, step: int) -> None:
    """Wait until a run in another process has saved a step."""
    for _ in range(6000):
        if checkpoint_files.folder_of(output / "checkpoints", step).exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{output} never saved step {step}")


def metrics(output: Path) -> list[dict[str, Any]]:
    """Return the logged metrics, without what a clock or the memory of the machine decides."""
    return [
        {key: value for key, value in line.items() if not key.startswith(("timing_s/", "perf/"))}
        for line in read_lines(output / "metrics.jsonl")
    ]


def everything(output: Path) -> dict[str, Any]:
    """Return all results of a run: metrics, samples, and the bytes of its final weights."""
    weights = {p.name: p.read_bytes() for p in sorted(output.glob("final*/*.safetensors"))}
    assert weights, f"{output} has no final model"
    completions = [json.loads(line) for line in (output / "completions.jsonl").read_text().splitlines()]
    return {"metrics": metrics(output), "completions": completions, "weights": weights}
