"""Folders of runs: one written line by line, as a test wants it, and one that training itself wrote."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import runs

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that writes a run's folder from metrics and completions."""

    def make(metrics: list[dict[str, Any]] | None = None, completions: list[dict[str, Any]] | None = None) -> Path:
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(
            "optim: {lr: 0.5, schedule: constant}\nreward:\n  functions:\n  - name: gsm8k\n"
        )
        (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0", "total_steps": 40}))
        for name, records in (("metrics", metrics), ("completions", completions)):
            if records is not None:
                text = "".join(json.dumps(record) + "\n" for record in records)
                (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        return folder

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a small training run wrote."""
    folder = tmp_path_factory.mktemp("trained") / "sorting"
    runs.run(folder, "observe.completions_per_step=16", "trainer.validate_every=3")
    return folder
