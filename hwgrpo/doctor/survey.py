"""Kernels and attention of the chosen backend, asked of torch in a child process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwgrpo_backends import Backend

from hwgrpo.doctor import child

SCRIPT = Path(__file__).with_name("inside.py")
LIMIT = 120.0
"""Seconds; importing torch takes minutes on cold network file systems."""


def look_inside(
    backend: Backend, devices: int, environ: Mapping[str, str], limit: float = LIMIT, arch: str | None = None
) -> dict[str, Any]:
    """Return {"kernels": ..., "attention": ...}; a part that cannot be told is {"error": why}.

    Args:
        backend: the chosen one.
        devices: how many of its devices this process could use.
        environ: of the child.
        arch: of the first device, where torch tells it.
    """
    question = {"backend": backend.name, "devices": devices > 0, "arch": arch}
    (answer,) = child.ask(SCRIPT, [question], limit, environ)
    parts: dict[str, Any] = {}
    for line in answer.lines:
        parts |= line
    missing = {"error": answer.trouble or "nothing was said"}
    return {part: parts.get(part, missing) for part in ("kernels", "attention")}
