"""Programs of a bash script whose output is known: `dirname`, `basename`, `cd FOLDER && pwd`, `TEST && echo TEXT`."""

from __future__ import annotations

import importlib.util
import os.path
import re
from collections.abc import Callable, Sequence

from hwgrpo.migrate.imports.bash_words import Statement, Word

_IMPORTS = re.compile(r"\s*import\s+([A-Za-z_]\w*)\s*;?\s*")
_NOT_ECHOED = re.compile(r"[\\*?\[]")
"""What may be an escape, or a pattern that bash replaces by names of files."""
_PYTHON = re.compile(r"python3?")


def is_installed(package: str) -> bool:
    """Return whether a package can be imported here; nothing of it is."""
    return importlib.util.find_spec(package) is not None


def output_of(
    statements: Sequence[Statement],
    expand: Callable[[Word], list[str]],
    folder: str | None,
    ask: Callable[[str], bool],
) -> str | None:
    """Return what statements print, which are never run; None where that is not known.

    Args:
        statements: those between `$(` and `)`.
        expand: what returns the fields of a word.
        folder: the folder in which the script is; None: not known.
        ask: what returns whether a package of Python is installed, `is_installed`.
    """
    if not statements:  # a comment, `# why`
        return ""
    if any(each.redirects_output and _prints(each) for each in statements):
        return None
    commands = [[each for word in statement.words for each in expand(word)] for statement in statements]
    if len(commands) == 1 and commands[0]:
        name, *arguments = commands[0]
        if name == "dirname" and len(arguments) == 1:
            return _dirname(arguments[0])
        if name == "basename" and 1 <= len(arguments) <= 2:
            return _basename(*arguments)
        if (name, *arguments) == ("pwd",):
            return folder
    joined = [each.after for each in statements[1:]]
    if len(commands) == 2 and joined in (["&&"], [";"]) and commands[1] == ["pwd"] and commands[0][:1] == ["cd"]:
        return folder_after(folder, commands[0][1:])
    return _echoed([(each.after, fields) for each, fields in zip(statements, commands, strict=True)], ask)


def _prints(statement: Statement) -> bool:
    """Return whether a command prints something, as neither `cd` nor an import does."""
    return statement.words[0].literal not in ("cd", "python", "python3")


def _echoed(commands: Sequence[tuple[str, list[str]]], ask: Callable[[str], bool]) -> str | None:
    """Return what a list of `echo` and tests for packages prints: `python3 -c 'import X' && echo a || echo b`."""
    printed, succeeds = [], True
    for after, fields in commands:
        if (after, succeeds) in (("&&", False), ("||", True)):
            continue
        if not fields or after in ("|", "|&", "&"):
            return None
        name, *arguments = fields
        tests = _IMPORTS.fullmatch(arguments[1]) if len(arguments) == 2 and arguments[0] == "-c" else None
        if name == "echo" and not any(each.startswith("-") or _NOT_ECHOED.search(each) for each in arguments):
            printed.append(" ".join(arguments))
            succeeds = True
        elif _PYTHON.fullmatch(name) and tests:
            succeeds = ask(tests[1])
        else:
            return None
    return "\n".join(printed).rstrip("\n")


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
