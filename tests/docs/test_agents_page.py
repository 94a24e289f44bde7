"""The page about agents does what it says: its files are written and its commands run."""

import json
import re
from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from tests.docs.pages import page
from tests.docs.test_extend import commands, written

BLOCKS = re.findall(r"^```bash\n(.*?)^```$", page("agents.md"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: next(iter(written(block)), ""))
def test_a_block_of_the_page_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, text in written(block).items():
        Path(name).write_text(text)
        assert len(text.splitlines()) <= (10 if name == "tool.py" else 20)
    for arguments in commands(block):
        assert main([*arguments, "backend.name=cpu", "observe.progress=none"]) == 0
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.open()]
    assert max(each.get("agent/turns/max", 0) for each in steps) > 1
