"""Copies of the Triton row kernels' source with one thing wrong in them, loaded beside the kernels."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from hwgrpo_kernels import triton_kernels

SOURCES = Path(triton_kernels.__file__).parent
NAMES = ("triton_kernels", "triton_math")


def edited(name: str, edits: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return the kernels' sources by file name with snippets replaced.

    Args:
        name: what the edits are for, for the message.
        edits: (snippet, what takes its place); a snippet must be in just one of the files, and there once.

    Raises:
        ValueError: a snippet is not.
    """
    sources = {each: (SOURCES / f"{each}.py").read_text() for each in NAMES}
    for before, after in edits:
        found = {each: source.count(before) for each, source in sources.items() if before in source}
        if list(found.values()) != [1]:
            raise ValueError(
                f"the mutant '{name}' replaces a snippet that must be in the row kernels' source once and is found in "
                f"{found or 'none of ' + str(NAMES)}; write it as the source has it now:\n{before}"
            )
        [place] = found
        sources[place] = sources[place].replace(before, after)
    return sources


def load(sources: dict[str, str], folder: Path) -> ModuleType:
    """Write the sources to a new package in `folder` and import its kernels; the interpreter reads functions' files."""
    package = f"row_kernels_{len([each for each in sys.modules if each.startswith('row_kernels_')])}"
    (folder / package).mkdir()
    for name, source in {"__init__": "", **sources}.items():
        (folder / package / f"{name}.py").write_text(source)
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        return importlib.import_module(f"{package}.triton_kernels")
    finally:
        sys.path.remove(str(folder))
