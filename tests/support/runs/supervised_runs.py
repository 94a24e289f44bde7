"""Complete supervised runs of a very small model, in this process."""

from __future__ import annotations

from pathlib import Path

from hwgrpo_backends.cpu import BACKEND

from hwgrpo.config import Config, load_config
from hwgrpo.config.supervised import supervised_settings
from hwgrpo.support.jsonlines import read_lines
from hwgrpo.training.finish import finish
from hwgrpo.training.loop import Status, run_steps
from hwgrpo.training.run_parts import TrainingRun
from hwgrpo.training.supervised.steps import supervised_step, validate_examples
from hwgrpo.training.supervised.supervised_setup import build_supervised

COMMON = (
    "model.path=builtin://tiny?task=sort&hidden=32&layers=1&steps=0&digits=3",
    "data.max_prompt_tokens=48",
    "rollout.max_response_tokens=32",
    "optim.lr=3e-3",
    "trainer.prompts_per_step=8",
    "trainer.max_steps=6",
    "trainer.threads=1",
    "observe.loggers=[jsonl]",
    "observe.progress=none",
)
"""Settings of small runs that train on examples."""
SMALL = ("data.train=task://sort?digits=3", "data.validation_max_rows=8", *COMMON)


def small(output: Path, *overrides: str) -> Config:
    """Return the settings of a small supervised run."""
    words = [*SMALL, f"trainer.output_dir={output}", *overrides]
    return load_config(None, words, imported=("data.validation_max_rows",), used=supervised_settings)


def build(output: Path, *overrides: str) -> TrainingRun:
    """Build a small run."""
    return build_supervised(small(output, *overrides), BACKEND, 0, 1)


def run(output: Path, *overrides: str) -> Status:
    """Train to the end in this process."""
    parts = build(output, *overrides)
    try:
        status = run_steps(parts, supervised_step, validate_examples)
        finish(parts, status)
    finally:
        parts.close()
    return status


def results(output: Path) -> dict[str, object]:
    """Return a run's metrics, without times, and the bytes of its final weights."""
    lines = [
        {key: value for key, value in line.items() if not key.startswith(("timing_s/", "perf/throughput", "perf/max"))}
        for line in read_lines(output / "metrics.jsonl")
    ]
    weights = {path.parent.name: path.read_bytes() for path in sorted(output.glob("final*/*.safetensors"))}
    assert weights
    return {"metrics": lines, "weights": weights}
