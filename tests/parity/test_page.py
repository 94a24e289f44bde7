"""The commands of the page on parity run, and its table is that of this code."""

import re
import shlex
from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from hwgrpo.parity import comparison, layer_comparison, settings
from tests.docs.pages import blocks, page

COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for line in "".join(blocks(page("parity.md"), "bash")).splitlines()
    if line.startswith("hwgrpo ")
]
ROW = re.compile(r"^(\w[\w ,-]*?) {2,}\S+ +\S+ +\S+$", re.MULTILINE)


def test_the_commands_of_the_page_pass(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) == 8
    for command in COMMANDS:
        assert main([*command, "backend.name=cpu", "trainer.threads=1"]) == 0, command


def test_the_pages_table_has_the_stages_of_this_code(capsys):
    shown = ROW.findall("".join(blocks(page("parity.md"), "text")))
    assert main(["parity", "backend.name=cpu", "model.dtype=float32", "trainer.threads=1"]) == 0
    printed = capsys.readouterr().out
    assert shown == ROW.findall(printed)
    assert len(shown) == 19
    assert printed.splitlines()[-1] in page("parity.md")


@pytest.mark.parametrize("key", settings.OPEN)
def test_the_page_names_what_may_be_chosen(key: str):
    assert f"`{key}{'*' if key.endswith('.') else ''}`" in page("parity.md")


def test_the_pages_figure_of_memory_is_that_of_the_code():
    assert f"{comparison.BYTES_PER_PARAMETER} bytes of host memory per parameter" in page("parity.md")
    assert 24e9 // comparison.BYTES_PER_PARAMETER // 1e8 == 3  # "a model of 0.3B fits 24 GB"
    per_layer, per_head = layer_comparison.BYTES_PER_LAYER_PARAMETER, layer_comparison.BYTES_PER_HEAD_PARAMETER
    largest = f"{per_layer} bytes per parameter of its largest layer, or {per_head} of its LM head, and 3 GiB"
    assert largest in page("parity.md")
    assert layer_comparison.OTHER_BYTES == 3 * 2**30
