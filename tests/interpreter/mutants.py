"""Copies of the Triton row kernels' source with one thing wrong in them, loaded beside the kernels."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hwgrpo_kernels import triton_kernels

FOLDER = Path(triton_kernels.__file__).parent
FILES = ("triton_kernels.py", "triton_math.py")


class Case(NamedTuple):
    """A test of the suite and its parameters."""

    test: Callable[..., None]
    parameters: dict[str, Any]

    def run(self) -> None:
        """Run the test."""
        self.test(**self.parameters)

    def is_run_by_the_suite(self) -> bool:
        """Whether the test is parametrized with these values, among others."""
        left = dict(self.parameters)
        for mark in getattr(self.test, "pytestmark", ()):
            names = [name.strip() for name in mark.args[0].split(",")]
            sets = [getattr(each, "values", each if len(names) > 1 else [each]) for each in mark.args[1]]
            if [left.pop(name) for name in names] not in [list(each) for each in sets]:
                return False
        return not left


class Mutant(NamedTuple):
    """What is wrong, the case that must show it, and each snippet of source with what takes its place."""

    name: str
    case: Case
    edits: tuple[tuple[str, str], ...]


def sources_with(mutant: Mutant) -> dict[str, str]:
    """Return the mutant's source files by name.

    Raises:
        ValueError: a snippet is not there exactly once.
    """
    sources = unchanged()
    for before, after in mutant.edits:
        found = {name: source.count(before) for name, source in sources.items() if before in source}
        if list(found.values()) != [1]:
            where = ", ".join(f"{count} times in {name}" for name, count in found.items()) or "nowhere"
            raise ValueError(
                f"the mutant '{mutant.name}' replaces a snippet that must be once in {' and '.join(FILES)}, and is "
                f"{where}: write it as the kernels have it now\n{before}"
            )
        [name] = found
        sources[name] = sources[name].replace(before, after)
    return sources


def unchanged() -> dict[str, str]:
    """Return the kernels' source files by name."""
    return {name: (FOLDER / name).read_text() for name in FILES}


def load(sources: dict[str, str], folder: Path) -> ModuleType:
    """Write the files to `folder`, as a package of its name, and import its kernels.

    They must be files: the interpreter compiles each function anew from where it stands.
    """
    for name, source in {"__init__.py": "", **sources}.items():
        (folder / name).write_text(source)
    sys.path.insert(0, str(folder.parent))
    try:
        return importlib.import_module(f"{folder.name}.triton_kernels")
    finally:
        sys.path.remove(str(folder.parent))
