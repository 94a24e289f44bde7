"""Names of another project's settings: those of its tables, and other names that are read as them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hwgrpo.migrate.tables.peer_row import PeerRow


@dataclass(frozen=True)
class PeerNames:
    """The tables of one project."""

    project: str
    rows: Mapping[str, PeerRow]
    """Every row by its key; `a.b.*` is that of all keys below `a.b` without one of their own."""
    older: Mapping[str, str]
    """Names of other versions -> names of the rows."""
    tutorials: Mapping[str, str]
    """Names that no version has and tutorials teach -> names of the rows."""

    def current_name(self, key: str) -> tuple[str, str]:
        """Return the name of the rows for a key, and why it is another; "" where it is the same."""
        if key in self.tutorials:
            return self.tutorials[key], f"no version of {self.project} has this name; read as"
        for old, new in self.older.items():
            if key == old:
                return new, "an older name of"
            if old.endswith(".*") and key.startswith(old[:-1]) and self.row_of(key) is None:
                return new[:-1] + key.removeprefix(old[:-1]), "an older name of"
        return key, ""

    def row_of(self, key: str) -> PeerRow | None:
        """Return the row of a key by its name in the rows; None for an unknown one."""
        if key in self.rows:
            return self.rows[key]
        name = key
        while "." in name:
            name = name.rpartition(".")[0]
            if f"{name}.*" in self.rows:
                return self.rows[f"{name}.*"]
        return None

    def counterparts(self) -> Iterator[tuple[str, PeerRow]]:
        """Yield every name of a setting that has a counterpart, with its row."""
        for key, row in self.rows.items():
            if row.here:
                yield key.removesuffix(".*"), row
        for key in (*self.tutorials, *(old for old in self.older if not old.endswith(".*"))):
            row = self.row_of(self.current_name(key)[0])
            if row is not None and row.here:
                yield key, row
        for old, new in self.older.items():
            if old.endswith(".*"):
                for key, row in self.rows.items():
                    if key.startswith(new[:-1]) and row.here:
                        yield old[:-1] + key.removeprefix(new[:-1]).removesuffix(".*"), row
