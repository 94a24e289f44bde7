"""Programs of a bash script whose output is their arguments' text: `dirname`, `basename`, `cd FOLDER && pwd`."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Sequence

from hwgrpo.imports.bash_words import Statement, Word


def output_of(statements: Sequence[Statement], expand: Callable[[Word], list[str]], folder: str | None) -> str | None:
    """Return what statements print, which are never run; None where that is not known.

    Args:
        statements: those between `$(` and `)`.
        expand: what returns the fields of a word.
        folder: the folder in which the script is; None: not known.
    """
    if not statements:  # a comment, `# why`
        return ""
    commands = [[each for word in statement.words for each in expand(word)] for statement in statements]
    if len(commands) == 1 and commands[0]:
        name, *arguments = commands[0]
        if name == "dirname" and len(arguments) == 1:
            return _dirname(arguments[0])
        if name == "basename" and 1 <= len(arguments) <= 2:
            return _basename(*arguments)
        return folder if (name, *arguments) == ("pwd",) else None
    joined = [each.after for each in statements[1:]]
    if len(commands) == 2 and joined in (["&&"], [";"]) and commands[1] == ["pwd"] and commands[0][:1] == ["cd"]:
        return folder_after(folder, commands[0][1:])
    return None


def folder_after(folder: str | None, arguments: Sequence[str]) -> str | None:
    """Return the folder that `cd` with some arguments leads to from another; None where that is not known."""
    arguments = [each for each in arguments if each != "--"]
    if len(arguments) != 1 or not arguments[0] or arguments[0].startswith("-"):
        return None
    if folder is None and not arguments[0].startswith("/"):
        return None
    return os.path.normpath(os.path.join(folder or "/", arguments[0]))


def _dirname(path: str) -> str:
    stripped = path.rstrip("/")
    if "/" not in stripped:
        return "." if stripped or not path else "/"
    return stripped.rpartition("/")[0].rstrip("/") or "/"


def _basename(path: str, suffix: str = "") -> str:
    name = path.rstrip("/").rpartition("/")[2] or path[:1]
    return name.removesuffix(suffix) if name != suffix else name
