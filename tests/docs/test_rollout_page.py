"""docs/rollout.md lists the engines, and its commands have settings that are right."""

import shlex

import pytest

from hwgrpo.catalog import ENGINES
from hwgrpo.cli.main import main
from tests.docs.pages import blocks, code, page, table

PAGE = page("rollout.md")
RECIPE = ("tiny_sort", "model.path=builtin://tiny?task=sort&head=32")
"""One whose model vLLM can run on a CPU."""
TRAINING = [
    words[words.index("hwgrpo") + 1 :]
    for block in blocks(PAGE, "bash")
    for line in block.replace("\\\n", " ").splitlines()
    if "hwgrpo" in (words := shlex.split(line))
]


def test_the_page_lists_the_engines():
    assert sorted(code(row["engine"])[0] for row in table(PAGE, "engine", "what samples")) == sorted(ENGINES.names())


@pytest.mark.parametrize("arguments", TRAINING, ids=lambda words: words[-1])
def test_a_command_has_settings_that_are_right(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    """The engines need packages and servers, which the tests of vLLM have; a mistake in a setting exits with 2."""
    named = [each for word in arguments for each in (RECIPE if word == "RECIPE" else (word,))]
    started = arguments[0] == "launch"
    named = [word if word != "--run" else "--print" for word in named]
    status = main([*named, "backend.name=cuda" if started else "--dry-run"])  # hw: whose variable --visible sets
    printed = capsys.readouterr()
    assert status in (0, 1), printed.err
    assert ("CUDA_VISIBLE_DEVICES=0,1,2,3" if started else "schedule") in printed.out  # hw: that variable


def test_there_are_commands():
    assert len(TRAINING) == 6
