"""The diagnosis's children: they are told where this project's packages lie, for they are started from elsewhere."""

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
"""What a line of an answer begins with."""


def ask(
    script: Path, questions: Sequence[Mapping[str, Any]], timeout: float, environ: Mapping[str, str] = os.environ
) -> list[ChildOutput]:
    """Run `script` once per question, as `hwgrpo_backends.child.ask`; "path" is added to every question."""
    with asking(script, questions, timeout, environ) as answers:
        return answers()


def asking(
    script: Path, questions: Sequence[Mapping[str, Any]], timeout: float, environ: Mapping[str, str] = os.environ
) -> AbstractContextManager[Callable[[], list[ChildOutput]]]:
    """Start the children of `ask`, as `hwgrpo_backends.child.asking`."""
    folders = _package_folders()
    questions = [{**question, "path": folders} for question in questions]
    return child.asking(script, questions, timeout, environ, marker=MARKER)


def _package_folders() -> list[str]:
    specs = (importlib.util.find_spec(name) for name in ("hwgrpo", "hwgrpo_backends", "hwgrpo_kernels"))
    return [str(Path(spec.origin).absolute().parents[1]) for spec in specs if spec and spec.origin]
