"""docs/from-trl.md: its commands run, what it says of arguments and methods is so."""

import inspect
from pathlib import Path

import pytest

from hwgrpo.trl import GRPOTrainer
from tests.docs.page_commands import run_commands
from tests.docs.pages import code, page, table

PAGE = page("from-trl.md")


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert run_commands(PAGE) == 2
    shown = capsys.readouterr()
    assert "2 steps of 8 prompts x 8 samples" in shown.out
    for row in table(PAGE, "group", "meaning"):
        assert row["group"] == "Refused" or f"{row['group']} (" in shown.err


def test_every_argument_of_the_trainer_is_on_the_page():
    named = {name for row in table(PAGE, "argument", "here") for name in code(row["argument"])}
    assert named == {*inspect.signature(GRPOTrainer).parameters} - {"others"}


def test_every_method_on_the_page_exists():
    for row in table(PAGE, "method", "here"):
        for name in code(row["method"]):
            found = name.partition("(")[0]
            assert hasattr(GRPOTrainer, found) or found == "state", name
