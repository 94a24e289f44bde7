"""Ranks that a launcher such as torchrun has started. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping


def local_world_size(world_size: int, environ: Mapping[str, str] | None = None) -> int:
    """Return the number of ranks on this host.

    Args:
        world_size: the result where the launcher does not say.
        environ: the launcher's variables; None: those of this process.
    """
    return int((os.environ if environ is None else environ).get("LOCAL_WORLD_SIZE") or world_size)
