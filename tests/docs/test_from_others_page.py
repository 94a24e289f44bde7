"""docs/from-others.md: its commands run, and the groups that it names are those of the table."""

from pathlib import Path

import pytest

from hwgrpo.imports.import_result import TITLES
from tests.docs.page_commands import run_commands
from tests.docs.pages import page

PAGE = page("from-others.md")


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert run_commands(PAGE) == 2
    shown = capsys.readouterr()
    assert "64 prompts x 8 samples, 2 updates each" in shown.out
    assert "lr: 0.0001" in Path("sort.yaml").read_text()
    for group in ("mapped", "default", "ignored", "unread"):
        assert TITLES[group].format("OpenRLHF") + " (" in shown.err
    assert "ds.deepcompile" in shown.err


def test_the_page_names_every_group():
    groups = PAGE.partition("## What the table says")[2].partition("\n- ")[0]
    for title in TITLES.values():
        assert f"| {title.format('OpenRLHF').partition(':')[0]} |" in groups
