"""Check files before a commit: text ends with one newline, YAML and JSON can be read, none is large.

    python scripts/check_files.py FILE ...

Prints a line per problem; the exit code is 1 if there is one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

MOST_BYTES = 500_000
"""A larger file belongs into a release or a data set, not into the history, where it stays for ever."""
READERS = {".yaml": yaml.safe_load_all, ".yml": yaml.safe_load_all, ".cff": yaml.safe_load_all, ".json": json.loads}


def problems(path: Path) -> list[str]:
    """Return what is wrong with a file."""
    content = path.read_bytes()
    found = [f"has {len(content):,} bytes, of {MOST_BYTES:,} at most"] if len(content) > MOST_BYTES else []
    if b"\0" in content:
        return found  # a picture
    if content and not content.endswith(b"\n"):
        found.append("does not end with a newline")
    if content.endswith(b"\n\n"):
        found.append("ends with an empty line")
    reader = READERS.get(path.suffix)
    if reader is not None:
        try:
            list(reader(content.decode()))
        except (ValueError, yaml.YAMLError) as error:
            found.append(f"cannot be read: {' '.join(str(error).split())}")
    return found


def main(names: Sequence[str]) -> int:
    lines = [f"{name}: {problem}" for name in names if Path(name).is_file() for problem in problems(Path(name))]
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
