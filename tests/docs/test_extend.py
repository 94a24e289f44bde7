"""The page about extensions does what it says: each of its files is written and each of its commands run, in order."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from hwgrpo import user_code
from hwgrpo.catalog import ENGINES, STRATEGIES
from hwgrpo.cli.main import main

REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs" / "extend.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
MOST_LINES = 30


def written(block: str) -> dict[str, str]:
    """Return the files that a block writes."""
    return dict(re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", block, re.DOTALL | re.MULTILINE))


def commands(block: str) -> list[list[str]]:
    """Return the `hwgrpo` commands of a block, as lists of arguments."""
    joined = block.replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in joined.splitlines() if line.startswith("hwgrpo ")]


def test_a_class_is_in_the_module_that_the_page_names():
    named = re.findall(r"`(\w+)`\s+(?:of|from)\s+`(hwgrpo[\w.]*)`", PAGE)
    assert ("StepRewards", "hwgrpo.step_rewards") in named
    assert [pair for pair in named if not hasattr(importlib.import_module(pair[1]), pair[0])] == []


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: next(iter(written(block)), ""))
def test_a_block_runs_and_is_short(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(user_code, "_plugins", [])
    for registry in (ENGINES, STRATEGIES):  # what a plugin adds is gone with its test
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    for name, text in written(block).items():
        Path(name).write_text(text)
        assert len(text.splitlines()) < MOST_LINES
    for arguments in commands(block):
        assert main([*arguments, "backend.name=cpu", "observe.progress=none"]) == 0
    steps = [json.loads(line) for path in tmp_path.glob("runs/*/metrics.jsonl") for line in path.open()]
    assert {each["step"] for each in steps} >= {1, 2}
    if "loggers.py" in written(block):
        assert [line.split(",")[0] for line in Path("runs/logger/reward.csv").read_text().splitlines()] == ["1", "2"]
    if "counting.py" in written(block):
        first, second = (each["rollout/sampled"] for each in steps if "rollout/sampled" in each)
        assert second - first == 64 * 8 / 2
    if "metrics.py" in written(block):
        assert sum("repetition/mean" in each for each in steps) == 2
    if "mine.py" in written(block):
        assert any("fade" in name for each in steps for name in each)
