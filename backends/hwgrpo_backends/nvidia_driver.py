"""Which NVIDIA driver a CUDA build of torch needs. A newer driver than that always serves."""

from __future__ import annotations

import re

MINIMUM = {11: (450, 80), 12: (525,), 13: (580,)}
"""Major version of CUDA -> oldest Linux driver that runs programs built with any of its minor versions."""
SOURCE = "NVIDIA, CUDA Compatibility, minor version compatibility (docs.nvidia.com/deploy/cuda-compatibility)"


def needed(toolkit: str | None) -> str | None:
    """Return the oldest driver for a version of CUDA ("13.0"), as "580"; None where the table has no row."""
    minimum = MINIMUM.get(_numbers(toolkit)[0]) if toolkit and _numbers(toolkit) else None
    return ".".join(map(str, minimum)) if minimum else None


def is_too_old(driver: str, toolkit: str | None) -> bool | None:
    """Return whether `driver` ("570.86.10") cannot run CUDA `toolkit`; None where one of them is not known."""
    minimum = needed(toolkit)
    if minimum is None or not _numbers(driver):
        return None
    return _numbers(driver) < _numbers(minimum)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
