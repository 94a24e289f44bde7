"""Complete runs of `hwgrpo reward-model` with a very small model, in this process, and their data."""

from __future__ import annotations

import json
import random
from pathlib import Path

from hwgrpo_backends.cpu import BACKEND

from hwgrpo.config import Config, load_config
from hwgrpo.config.supervised import supervised_settings
from hwgrpo.research import reward_model_run
from hwgrpo.training.finish import finish
from hwgrpo.training.loop import Status, run_steps
from hwgrpo.training.run_parts import TrainingRun
from hwgrpo.training.supervised.supervised_setup import build_supervised
from tests.support.runs.supervised_runs import COMMON, results

__all__ = ["build", "outcomes", "pairs", "results", "run", "small"]


def small(output: Path, *overrides: str) -> Config:
    """Return the settings of a small run."""
    return load_config(None, [*COMMON, f"trainer.output_dir={output}", *overrides], used=supervised_settings)


def build(output: Path, *overrides: str) -> TrainingRun:
    """Build a small run."""
    return build_supervised(small(output, *overrides), BACKEND, 0, 1, training=reward_model_run.REWARD_MODEL)


def run(output: Path, *overrides: str) -> Status:
    """Train to the end in this process."""
    parts = build(output, *overrides)
    try:
        status = run_steps(parts, reward_model_run.REWARD_MODEL.step, reward_model_run.REWARD_MODEL.validate)
        finish(parts, status)
    finally:
        parts.close()
    return status


def pairs(file: Path, count: int, *, held_out: bool = False) -> Path:
    """Write pairs of a right and a wrong answer to the task sort, with a margin; held out: of other prompts."""
    draw = random.Random(held_out)
    rows = []
    while len(rows) < count:
        given = [draw.randrange(10) for _ in range(draw.randint(2, 3))]
        if (sum(given) % 5 == 0) != held_out:
            continue
        right = "".join(map(str, sorted(given)))
        wrong = right
        while wrong == right:
            wrong = "".join(str(draw.choice(given)) for _ in range(draw.randint(1, len(given))))
        prompt = f"sort {''.join(map(str, given))}="
        rows.append({"prompt": prompt, "chosen": right, "rejected": wrong, "margin": len(given) / 4})
    return _write(file, rows)


def outcomes(file: Path, count: int, *, held_out: bool = False) -> Path:
    """Write right and wrong answers to the task sort, in turn, with their reward; held out: to other prompts."""
    rows = []
    for line in pairs(file, count // 2, held_out=held_out).read_text().splitlines():
        pair = json.loads(line)
        for key, reward in (("chosen", 1.0), ("rejected", 0.0)):
            rows.append({"prompt": pair["prompt"], "response": pair[key], "reward": reward})
    return _write(file, rows)


def _write(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
