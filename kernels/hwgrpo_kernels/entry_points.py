"""Find the entry points of a group, even if the list of another distribution is damaged.

`importlib.metadata.entry_points` raises for the first unreadable list of any distribution.
"""

from importlib.metadata import Distribution, EntryPoint, distributions
from typing import NamedTuple


class EntryPointScan(NamedTuple):
    """The entry points of a group, and the distributions whose lists are unreadable."""

    points: tuple[EntryPoint, ...]
    damaged: dict[str, str]
    """Distribution -> the error and the remedy."""


def find(group: str) -> EntryPointScan:
    """Return the entry points of `group`; of a distribution installed twice, the first counts."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    damaged: dict[str, str] = {}
    for distribution in distributions():
        try:
            if group not in (distribution.read_text("entry_points.txt") or ""):
                continue  # before reading its name, which is slower
            points, problem = tuple(distribution.entry_points.select(group=group)), None
        except Exception as error:  # not text, or a line without `name = value`
            points, problem = (), f"{type(error).__name__}: {error}"
        name = _name(distribution)
        if name in found:
            continue
        found[name] = points
        if problem:
            damaged[name] = (
                f"its entry_points.txt is unreadable ({problem}); repair it: pip install --force-reinstall {name}"
            )
    return EntryPointScan(tuple(point for points in found.values() for point in points), damaged)


def _name(distribution: Distribution) -> str:
    try:
        return distribution.name or "unknown distribution"
    except Exception:  # its metadata is damaged as well
        return "unknown distribution"
