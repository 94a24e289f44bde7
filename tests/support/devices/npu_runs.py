"""Runs of one recipe on simulated NPUs and on the CPU: their settings, what they wrote, and whether it is the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.numbers.rounding import GENTLE, STEP, assert_metrics_close, drift
from tests.support.processes.launch import ROOT
from tests.support.runs import runs

RECIPE = str(ROOT / "configs/tiny_sort.yaml")
WORDS = (
    "model.path=builtin://tiny?task=sort&steps=150&batch=64",
    "model.dtype=float32",
    "trainer.tokens_per_micro_batch=4096",
    "trainer.prompts_per_step=32",
    "data.validation_max_rows=32",
    "observe.loggers=[jsonl]",
    "observe.progress=none",
    *GENTLE,
)


@dataclass(frozen=True)
class Written:
    """The files of a run's folder."""

    metrics: list[dict[str, Any]]
    completions: list[dict[str, Any]]
    environment: dict[str, Any]


def read(output: Path) -> Written:
    """Read the files of a finished run."""
    completions = [json.loads(line) for line in (output / "completions.jsonl").read_text().splitlines()]
    return Written(runs.metrics(output), completions, json.loads((output / "environment.json").read_text()))


def assert_same(found: Written, expected: Written) -> None:
    """Compare all but the environment: the same responses, and numbers but for rounding."""
    for ours, theirs in zip(found.completions, expected.completions, strict=True):
        assert ours["advantage"] == pytest.approx(theirs["advantage"], abs=STEP)
        assert ours == theirs | {"advantage": ours["advantage"]}
    assert_metrics_close(found.metrics, expected.metrics, drift(len(expected.metrics)))
