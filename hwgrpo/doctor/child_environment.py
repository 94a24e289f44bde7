"""Child processes of the diagnosis, which find this project's packages though started from another folder."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hwgrpo_backends import child
from hwgrpo_backends.child import ChildOutput

MARKER = "hwgrpo.doctor "
"""Prefix of the output lines of a child."""


def run_children(
    script: Path, requests: Sequence[Mapping[str, Any]], timeout: float, environ: Mapping[str, str] = os.environ
) -> list[ChildOutput]:
    """Run `script` once per request, as `hwgrpo_backends.child.run_children`; "path" is added to every request."""
    with start_children(script, requests, timeout, environ) as wait:
        return wait()


def start_children(
    script: Path, requests: Sequence[Mapping[str, Any]], timeout: float, environ: Mapping[str, str] = os.environ
) -> AbstractContextManager[Callable[[], list[ChildOutput]]]:
    """Start the children of `run_children`, as `hwgrpo_backends.child.start_children`."""
    folders = _package_folders()
    requests = [{**request, "path": folders} for request in requests]
    return child.start_children(script, requests, timeout, environ, marker=MARKER)


def _package_folders() -> list[str]:
    specs = (importlib.util.find_spec(name) for name in ("hwgrpo", "hwgrpo_backends", "hwgrpo_kernels"))
    return [str(Path(spec.origin).absolute().parents[1]) for spec in specs if spec and spec.origin]
