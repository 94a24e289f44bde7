"""A device that a run is planned for and that need not be on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from hwgrpo_backends.device import Device, Memory

from hwgrpo.support.launched_ranks import local_world_size

USABLE = 0.9
"""Share of a device's memory for a run; the rest is for driver, libraries and allocator."""


@dataclass(frozen=True)
class PlannedDevice:
    """A device known by its data sheet only: what is installed on its host is not asked."""

    total: int | None
    """Bytes of its memory; None: not known."""
    count: int
    """Devices of a host, each with a rank."""
    usable: float = USABLE
    """Share of its memory for a run."""

    def memory(self) -> Memory:
        """Return its memory in bytes, as `Device.memory` does."""
        return Memory(total=self.total)


RunDevice = Device | PlannedDevice
"""A device of a run: this process's, or one that is planned."""


def usable_share(device: RunDevice | None) -> float:
    """Return the share of a device's memory for a run."""
    return device.usable if isinstance(device, PlannedDevice) else USABLE


def ranks_of_host(world_size: int, device: RunDevice | None) -> int:
    """Return the number of ranks on a host."""
    return device.count if isinstance(device, PlannedDevice) else local_world_size(world_size)
