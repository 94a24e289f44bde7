"""What distributions offer in a group of entry points, where one whose list is damaged hides nothing but itself.

`importlib.metadata.entry_points` fails on the first list that it cannot read, whosever it is.
"""

from importlib.metadata import Distribution, EntryPoint, distributions
from typing import NamedTuple


class Offers(NamedTuple):
    """The entry points of a group, and why the lists of other distributions cannot be read."""

    points: tuple[EntryPoint, ...]
    damaged: dict[str, str]
    """Distribution -> the error and the remedy."""


def find(group: str) -> Offers:
    """Return what the installed distributions offer in `group`; of one that is there twice, the first counts."""
    offered: dict[str, tuple[EntryPoint, ...]] = {}
    damaged: dict[str, str] = {}
    for distribution in distributions():
        try:
            if group not in (distribution.read_text("entry_points.txt") or ""):
                continue  # before its name is read, which takes longer
            points, problem = tuple(distribution.entry_points.select(group=group)), None
        except Exception as error:  # not text, or a line that is no `name = value`: the others can still be had
            points, problem = (), f"{type(error).__name__}: {error}"
        name = _name(distribution)
        if name in offered:
            continue
        offered[name] = points
        if problem:
            damaged[name] = (
                f"its entry_points.txt cannot be read ({problem}); repair it: pip install --force-reinstall {name}"
            )
    return Offers(tuple(point for points in offered.values() for point in points), damaged)


def _name(distribution: Distribution) -> str:
    try:
        return distribution.name or "unknown distribution"
    except Exception:  # its record is damaged as well
        return "unknown distribution"
