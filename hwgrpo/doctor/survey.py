"""Kernels and attention of the chosen backend, asked of torch in a child process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hwgrpo.doctor import child_environment

SCRIPT = Path(__file__).with_name("inside.py")
LIMIT = 120.0
"""Seconds; importing torch takes minutes on cold network file systems."""


class Question(NamedTuple):
    """What the child is asked: the same question has the same answer."""

    backend: str
    devices: bool
    """Whether this process could use some of its devices."""
    arch: str | None = None
    """Of the first device, where torch tells it."""


def look_inside(question: Question, environ: Mapping[str, str], limit: float = LIMIT) -> dict[str, Any]:
    """Return {"kernels": ..., "attention": ...}; a part that cannot be told is {"error": why}.

    Args:
        environ: of the child.
        limit: seconds it may take.
    """
    with looking_inside(question, environ, limit) as told:
        return told()


@contextmanager
def looking_inside(
    question: Question, environ: Mapping[str, str], limit: float = LIMIT
) -> Iterator[Callable[[], dict[str, Any]]]:
    """Start the child of `look_inside`, and give the function that waits for what it tells."""

    def told() -> dict[str, Any]:
        (answer,) = answers()
        parts: dict[str, Any] = {}
        for line in answer.lines:
            parts |= line
        missing = {"error": answer.trouble or "nothing was said"}
        return {part: parts.get(part, missing) for part in ("kernels", "attention")}

    with child_environment.asking(SCRIPT, [question._asdict()], limit, environ) as answers:
        yield told
