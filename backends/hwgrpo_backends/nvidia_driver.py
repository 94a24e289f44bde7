"""NVIDIA's driver: its version, and which one a CUDA build of torch needs. A newer driver than that always serves."""

from __future__ import annotations

import re

FILE = "proc/driver/nvidia/version"
"""Where the kernel module says its version."""
MINIMUM = {11: (450, 80), 12: (525,), 13: (580,)}
"""Major version of CUDA -> oldest Linux driver that runs programs built with any of its minor versions."""
SOURCE = "NVIDIA, CUDA Compatibility, minor version compatibility (docs.nvidia.com/deploy/cuda-compatibility)"
OLDEST_NUMBER = 100
"""JetPack 5 has the release of Jetson Linux there ("35.4.1"), which is not comparable with drivers."""


def version_in(text: str) -> str | None:
    """Return the version that `FILE` names; None: none.

    The line is "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  ..." or, for the open module, "NVRM version:
    NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build ...".
    """
    found = re.search(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)(?=\s|$)", text, re.MULTILINE)
    return found[1] if found else None


def needed(toolkit: str | None) -> str | None:
    """Return the oldest driver for a version of CUDA ("13.0"), as "580"; None where the table has no row."""
    minimum = MINIMUM.get(_numbers(toolkit)[0]) if toolkit and _numbers(toolkit) else None
    return ".".join(map(str, minimum)) if minimum else None


def is_too_old(driver: str | None, toolkit: str | None) -> bool | None:
    """Return whether `driver` ("570.86.10") cannot run CUDA `toolkit`; None where one of them is not known."""
    minimum = needed(toolkit)
    return None if minimum is None else is_older(driver, _numbers(minimum))


def is_older(driver: str | None, minimum: tuple[int, ...]) -> bool | None:
    """Return whether `driver` is older than `minimum`; None where it is not known."""
    numbers = _numbers(driver or "")
    return numbers < minimum if numbers and numbers[0] >= OLDEST_NUMBER else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
