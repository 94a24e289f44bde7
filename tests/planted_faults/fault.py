"""A fault that can be planted."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault: `text` of a file of `hwgrpo` is replaced by `planted`."""

    name: str
    file: str
    text: str
    planted: str
    tests: str
    """Arguments of pytest, below tests/."""
