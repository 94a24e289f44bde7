"""The page about Python: its examples run one after another as they stand, twice in one process."""

import json
from pathlib import Path

import pytest

from tests.docs.pages import blocks, page

PAGE = page("python.md")
SOURCE = "\n".join(blocks(PAGE, "python"))


def test_the_examples_run_twice_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    rewards = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        exec(compile(SOURCE, "python.md", "exec"), {"__name__": "__main__"})
        runs = sorted(path.parent.name for path in Path("runs").glob("*/summary.json"))
        assert runs == ["config", "entries", "first", "loop", "mapping", "model", "rewards", "rows"]
        lines = [line for run in runs for line in Path("runs", run, "metrics.jsonl").read_text().splitlines()]
        rewards.append([json.loads(line).get("reward") for line in lines])
    assert rewards[0] == rewards[1]
