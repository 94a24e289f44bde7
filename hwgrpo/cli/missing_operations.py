"""Errors of a device that cannot compute a step: an operation that its backend lacks, a kernel that cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hwgrpo.errors import ConfigError

if TYPE_CHECKING:
    from hwgrpo_backends.device import Device


@contextmanager
def name_missing_operations(device: Device) -> Iterator[None]:
    """Turn torch's error and the kernels' in the block into one that names the device.

    Raises:
        ConfigError: the device cannot compute the step. Other errors propagate unchanged.
    """
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        if type(error) not in (NotImplementedError, ValueError):  # one of ours
            raise
        raise ConfigError(f"{device.name} ({device.backend.name}) cannot compute the step: {error}") from error
