"""The launcher's variables are read in one place: empty is unset, and a wrong one is an error that names it."""

import ast
from pathlib import Path

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.support.launched_ranks import LaunchedRank, launched_rank, local_world_size

REPO = Path(__file__).parents[2]
VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
AS_TEXT = {"cli/process_exit.py", "cli/launch.py", "doctor/host_facts.py", "rollout/server/server_api.py"}
"""Files that set, print or remove the variables, or only look whether one is set."""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 0, 1, 1)),
        ({"WORLD_SIZE": "", "RANK": "", "LOCAL_RANK": " ", "LOCAL_WORLD_SIZE": ""}, (0, 0, 1, 1)),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (3, 1, 4, 2)),
        ({"WORLD_SIZE": "4", "RANK": "3"}, (3, 0, 4, 4)),
        ({"LOCAL_RANK": "1"}, (0, 1, 1, 1)),  # one process on the second device
    ],
)
def test_the_rank_is_read_from_the_launchers_variables(environ: dict[str, str], expected: tuple[int, ...]):
    assert launched_rank(environ) == LaunchedRank(*expected)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE='-1'"),
        ({"WORLD_SIZE": "²"}, "WORLD_SIZE='²'"),
        ({"WORLD_SIZE": "9" * 5000}, "5002 characters"),
        ({"WORLD_SIZE": "2", "RANK": "1.5"}, "RANK='1.5'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 in the environment must be below WORLD_SIZE=2: "),
        ({"RANK": "3"}, "RANK=3 in the environment must be below WORLD_SIZE=1, its default: "),
        ({"LOCAL_RANK": "a"}, "LOCAL_RANK='a'"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0'"),
    ],
)
def test_a_wrong_variable_is_named(environ: dict[str, str], message: str):
    with pytest.raises(ConfigError) as raised:
        launched_rank(environ)
    assert message in str(raised.value)
    assert "unset" in str(raised.value)


def test_ranks_of_this_host_may_be_unknown():
    assert local_world_size(8, {}) == 8
    assert local_world_size(8, {"LOCAL_WORLD_SIZE": "4"}) == 4


def test_no_other_file_converts_the_variables():
    """Each copy had a way of its own to fail: int('') is a traceback."""
    found = set()
    for file in (REPO / "hwgrpo").rglob("*.py"):
        name = str(file.relative_to(REPO / "hwgrpo"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.environ.get":
                first = node.args[0]
                if isinstance(first, ast.Constant) and first.value in VARIABLES:
                    found.add(name)
    assert found - AS_TEXT == set()
