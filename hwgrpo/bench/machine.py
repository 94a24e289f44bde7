"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.device import Device

import hwgrpo


def machine_facts(device: Device) -> dict[str, Any]:
    """Return facts about the machine. `load` is the mean number of runnable processes in the last minute."""
    return {
        "backend": device.backend.name,
        "device": processor() if device.backend.is_host else device.name,
        "arch": device.arch,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "threads": torch.get_num_threads(),
        "hwgrpo": hwgrpo.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def processor() -> str:
    """Return the processor's name; platform.processor() is only x86_64 on Linux."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
