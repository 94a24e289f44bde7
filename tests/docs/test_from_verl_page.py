"""docs/from-verl.md: its commands run, and its tables are the rows that the importer reads."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.page_commands import run_commands
from tests.docs.pages import REPO, page

PAGE = page("from-verl.md")


def test_the_tables_are_current():
    command = [sys.executable, "scripts/generate_peer_tables.py", "--check"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert run_commands(PAGE) == 3
    shown = capsys.readouterr()
    assert shown.out.count("2 steps of 64 prompts x 8 samples, 2 updates each") == 2
    assert "save_every: 1" in Path("sort.yaml").read_text()
    for title in re.findall(
        r"^\| (\w[^|]*) \|", PAGE.partition("## What the table says")[2].partition("\n- ")[0], re.MULTILINE
    ):
        assert title in ("group", "Refused") or f"{title} (" in shown.err
