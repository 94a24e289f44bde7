"""The simulated NPU: `simulated_device` with torch_npu."""

import subprocess
from pathlib import Path

from tests.support.devices import simulated_device
from tests.support.devices.simulated_device import CHOICES, VERSION

__all__ = ["CHOICES", "VERSION", "environment", "packages", "train"]


def packages() -> Path:
    """Return the folder with the package torch_npu and its record; see `simulated_device.packages`."""
    return simulated_device.packages("torch_npu")


def environment(**settings: str) -> dict[str, str]:
    """Return the variables of a process that has the device.

    Args:
        settings: more of them, such as SIMULATED_NPU_DEVICES (1 when left out) and SIMULATED_NPU_MB (4096).
    """
    return simulated_device.environment([packages()], **settings)


def train(*words: str, npus: int = 0, ranks: int = 1, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run `hwgrpo train WORDS` on a host with `npus` simulated NPUs; see `simulated_device.train`."""
    folders = [packages()] if npus else []
    return simulated_device.train(
        *words, folders=folders, ranks=ranks, **{"SIMULATED_NPU_DEVICES": str(npus), **settings}
    )
