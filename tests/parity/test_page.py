"""The commands of the page on parity run, and its table is that of this code."""

import re
import shlex

import pytest

from hwgrpo.cli.main import main
from tests.docs.pages import blocks, page

COMMANDS = re.findall(r"^hwgrpo (.*?)(?: #.*)?$", "".join(blocks(page("parity.md"), "bash")), flags=re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_passes(command: str, capsys):
    assert main([*shlex.split(command), "backend.name=cpu", "trainer.threads=1"]) == 0
    assert "Error" not in capsys.readouterr().err


def test_the_pages_table_has_the_stages_and_tolerances_of_fp32(capsys):
    """Tolerances follow from fp64; errors follow from the processor."""
    shown = re.findall(r"^(\w[\w ,]*?) {2,}\S+ +(\S+) +\S+$", "".join(blocks(page("parity.md"), "text")), re.MULTILINE)
    assert main(["parity", "backend.name=cpu", "model.dtype=float32", "trainer.threads=1"]) == 0
    printed = re.findall(r"^(\w[\w ,]*?) {2,}\S+ +(\S+) +\S+$", capsys.readouterr().out, re.MULTILINE)
    assert shown[0] == printed[0] == ("stage", "tolerance")
    assert len(shown) > 5
    for (stage, tolerance), (name, expected) in zip(shown[1:], printed[1:], strict=False):
        assert stage == name
        assert float(tolerance) == pytest.approx(float(expected), rel=0.1)
