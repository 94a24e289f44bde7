"""The commands of a page that writes one file and runs hwgrpo on it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hwgrpo.cli.main import main
from tests.docs.pages import blocks

_FILE = re.compile(r"^cat > (\S+) <<'END'\n(.*?)^END$", re.DOTALL | re.MULTILINE)


def run_commands(text: str) -> int:
    """Write the file of a page here, run its commands in order, and return how many there are.

    Raises:
        AssertionError: a command fails.
    """
    shell = "".join(blocks(text, "bash"))
    [(name, content)] = _FILE.findall(shell)
    Path(name).write_text(content)
    commands = re.findall(r"^hwgrpo (.*)$", shell, re.MULTILINE)
    for command in commands:
        assert main(shlex.split(command)) == 0, command
    return len(commands)
