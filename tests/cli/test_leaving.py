"""The process of a rank ends before the interpreter takes itself apart: nothing can abort it any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ABORTS = """
import atexit, os, sys
from hwgrpo.cli.process_exit import ended_as_rank

class Thread:
    def __del__(self, abort=os.abort):  # as a thread of a process group does, now and then
        abort()

with ended_as_rank():
    held = Thread()
    atexit.register(lambda: print("tidied"))
    print("done")
    {ending}
"""


def ended(tmp_path: Path, ending: str, **variables: str) -> tuple[int, str]:
    script = tmp_path / "process.py"
    script.write_text(ABORTS.format(ending=ending))
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | variables
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("ending", "code"),
    [("pass", 0), ("sys.exit(0)", 0), ("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('why')", 1), ("1 / 0", 1)],
)
def test_a_rank_ends_with_its_code_once_everything_else_is_tidied(tmp_path: Path, ending: str, code: int):
    assert ended(tmp_path, ending, RANK="0") == (code, "done\ntidied\n")


def test_a_process_that_is_no_rank_ends_as_python_does(tmp_path: Path):
    assert ended(tmp_path, "sys.exit(0)")[0] < 0


def test_the_command_ends_like_that(tmp_path: Path):
    """What `python -m hwgrpo` and the installed `hwgrpo` run."""
    (tmp_path / "process.py").write_text(
        "import os, sys\nfrom hwgrpo.__main__ import run\nfrom hwgrpo.cli import main\n"
        "class Thread:\n    def __del__(self, abort=os.abort):\n        abort()\n"
        "held = Thread()\nmain.main = lambda: 2\nrun()\n"
    )
    words = [sys.executable, str(tmp_path / "process.py")]
    assert subprocess.run(words, env={**os.environ, "RANK": "1"}, check=False).returncode == 2
