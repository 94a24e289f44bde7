"""Installed distributions, as their records lie on disk.

`importlib.metadata` reads the same records, from zip files too; importing it takes as long as the rest of detection.
Sources: the PyPA specifications of recording installed projects and of entry points.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

RECORD = re.compile(r"(?P<name>.+?)(-(?P<version>[^-]+)(-py[\d.]+)?)?\.(dist|egg)-info")
"""Name of a record's folder; that of a checkout installed in the old way has no version."""


@dataclass(frozen=True)
class Distribution:
    """One installed distribution."""

    record: Path
    """Its folder *.dist-info, or *.egg-info."""

    @property
    def name(self) -> str:
        """Its name as it spells it."""
        return self._header("Name") or _parts(self.record.name)["name"]

    @property
    def version(self) -> str | None:
        """Its version; None where its record has none."""
        return self._header("Version") or _parts(self.record.name)["version"]

    def read_text(self, file: str) -> str | None:
        """Return a file of its record, or None.

        Raises:
            UnicodeDecodeError: it is no text.
        """
        try:
            return (self.record / file).read_text(encoding="utf-8")
        except OSError:
            return None

    def _header(self, field: str) -> str | None:
        for file in ("METADATA", "PKG-INFO"):
            try:
                head = (self.read_text(file) or "").partition("\n\n")[0]
            except UnicodeDecodeError:  # the folder's name has it
                return None
            if found := re.search(rf"(?m)^{field}:\s*(\S+)", head):
                return found[1]
        return None


def installed(path: Iterable[str]) -> Iterator[Distribution]:
    """Yield the distributions on `path`, in its order; the first of a name is the one that is imported.

    Args:
        path: folders, as in `sys.path`; "" is the current one.
    """
    for folder in path:
        try:
            entries = sorted(os.listdir(folder or "."))
        except OSError:  # a zip file, or not there
            continue
        for entry in entries:
            if entry.endswith("-info") and RECORD.fullmatch(entry):
                yield Distribution(Path(folder or ".") / entry)


def versions(path: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Return the version of each distribution among `names` that is on `path`.

    Args:
        path: folders, as in `sys.path`.
        names: of distributions, in any spelling.
    """
    first: dict[str, Distribution] = {}
    for distribution in installed(path):
        first.setdefault(normalized(_parts(distribution.record.name)["name"]), distribution)
    there = {name: first[normalized(name)].version for name in names if normalized(name) in first}
    return {name: version for name, version in there.items() if version}


def normalized(name: str) -> str:
    """Return a distribution's name in the one spelling in which equal names are equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _parts(folder: str) -> re.Match[str]:
    found = RECORD.fullmatch(folder)
    assert found, folder
    return found
