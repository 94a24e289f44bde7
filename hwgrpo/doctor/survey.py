"""Kernels and attention of the chosen backend, asked of torch in a child process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hwgrpo_backends import Backend

from hwgrpo.catalog import ENGINES
from hwgrpo.doctor import child_environment

SCRIPT = Path(__file__).with_name("survey_child.py")
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


class Engine(NamedTuple):
    """A rollout engine on one backend."""

    name: str
    usable: bool
    reason: str


def rollout_engines(backend: Backend, built_in: Collection[str], distributions: Mapping[str, str]) -> list[Engine]:
    """Return the engines that `backend` prefers, best first, then those on servers that it does not name.

    Args:
        built_in: names of the engines that this version of hwgrpo has.
        distributions: what is installed -> version.
    """
    others = [name for name in built_in if ENGINES.load(name).on_server and name not in backend.rollout]
    return [_engine(name, built_in, distributions) for name in (*backend.rollout, *others)]


def _engine(name: str, built_in: Collection[str], distributions: Mapping[str, str]) -> Engine:
    if name not in built_in:
        return Engine(name, False, "not in this version of hwgrpo")
    kind = ENGINES.load(name)
    installed = [f"{package} {distributions[package]}" for package in kind.packages if package in distributions]
    if kind.packages and not installed:
        return Engine(name, False, f"{' or '.join(kind.packages)} is not installed: pip install 'hwgrpo[vllm]'")
    return Engine(name, True, installed[0] if installed else kind.remark)
