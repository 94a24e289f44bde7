"""Kernels and attention of the selected backend, read from torch in a child process; rollout engines."""

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
"""Timeout in seconds; importing torch takes minutes on cold network file systems."""


class SurveyRequest(NamedTuple):
    """Request to the child process; equal requests have equal results."""

    backend: str
    devices: bool
    """Whether this process can use at least one of its devices."""
    arch: str | None = None
    """Architecture of the first device, where torch reports one."""


def survey_backend(request: SurveyRequest, environ: Mapping[str, str], limit: float = LIMIT) -> dict[str, Any]:
    """Return {"kernels": ..., "attention": ...}; a part that failed is {"error": reason}.

    Args:
        request: the backend to survey.
        environ: environment of the child.
        limit: timeout in seconds.
    """
    with start_survey(request, environ, limit) as wait:
        return wait()


@contextmanager
def start_survey(
    request: SurveyRequest, environ: Mapping[str, str], limit: float = LIMIT
) -> Iterator[Callable[[], dict[str, Any]]]:
    """Start the child of `survey_backend`; yield a function that waits for its result."""

    def wait() -> dict[str, Any]:
        (output,) = wait_for_children()
        parts: dict[str, Any] = {}
        for line in output.lines:
            parts |= line
        missing = {"error": output.failure or "no output"}
        return {part: parts.get(part, missing) for part in ("kernels", "attention")}

    with child_environment.start_children(SCRIPT, [request._asdict()], limit, environ) as wait_for_children:
        yield wait


class Engine(NamedTuple):
    """A rollout engine on one backend."""

    name: str
    usable: bool
    reason: str


def rollout_engines(backend: Backend, built_in: Collection[str], distributions: Mapping[str, str]) -> list[Engine]:
    """Return the engines that `backend` prefers, best first, then those on servers that it does not name.

    Args:
        backend: the selected backend.
        built_in: names of the engines of this version of hwgrpo.
        distributions: installed distribution -> version.
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
