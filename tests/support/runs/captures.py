"""Captured steps of small runs, and their replays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hwgrpo_backends import Backend
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.cli.main import main
from tests.support.runs import runs

TWO_UPDATES = ("algorithm.kl.coef=0.1", "trainer.prompts_per_update=2")
"""A step with old and reference log-probs."""
SHORT = ("trainer.max_steps=3", "trainer.validate_every=0", "trainer.validate_at_start=false", "trainer.threads=1")


def capture(output: Path, *overrides: str, backend: Backend = BACKEND) -> Path:
    """Run three steps and capture the first and the third; return the folder of the captures."""
    settings = ("trainer.capture_steps=[1,3]", *SHORT, *overrides)
    assert runs.run(output, *settings, backend=backend) == "completed"
    return output / "captures"


def replay(
    capsys: pytest.CaptureFixture[str], step: Path, *arguments: str, trust: tuple[str, ...] = ("--trust-code",)
) -> dict[str, Any]:
    """Return the JSON of a replay on the CPU, or on the `backend.name` of the arguments; rewards of runs are files."""
    capsys.readouterr()
    names_it = step.is_file() or any(each.startswith("backend.name=") for each in arguments)
    backend = [] if names_it else ["backend.name=cpu"]
    code = main(["replay", str(step), *([] if step.is_file() else trust), *backend, *arguments, "--json"])
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert code == (0 if report["passed"] else 1), printed.err
    return report


def error_of(capsys: pytest.CaptureFixture[str], step: Path, *arguments: str) -> str:
    """Return the error of a replay that is refused."""
    capsys.readouterr()
    assert main(["replay", str(step), *arguments]) == 2
    return capsys.readouterr().err
