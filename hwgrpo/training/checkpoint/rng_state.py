"""The random state of a process as uint8 tensors: torch's host and device generators, numpy's and Python's."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from hwgrpo_backends.device import Device


def capture(device: Device) -> dict[str, torch.Tensor]:
    """Return the state of every generator of this process.

    Sampling needs none of it (its numbers are a function of seed, prompt and position); dropout and users' reward
    functions may.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "device": device.rng_state().cpu(),
        "family": _bytes(device.backend.name),
        "python": _bytes(random.getstate()),
        "numpy": _bytes([kind, np.asarray(keys).tolist(), position, has_gauss, gauss]),
    }


def restore(state: Mapping[str, torch.Tensor], device: Device, seed: int) -> str | None:
    """Put every generator into a state that `capture` returned.

    The generators of two device families have nothing in common: on another family than the one the state is from, the
    device's generator starts from `seed` instead.

    Returns:
        A note where that was so, else None.
    """
    # Written before families were recorded: states of another length are of another family.
    family = _value(state["family"]) if "family" in state else None
    same = state["device"].numel() == device.rng_state().numel() if family is None else family == device.backend.name
    if not same:
        device.manual_seed(seed)  # the host's generator, too, whose state is restored below
    torch.set_rng_state(state["torch"])
    if same:
        device.set_rng_state(state["device"])
    version, internal, gauss = _value(state["python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = _value(state["numpy"])
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    if same:
        return None
    return (
        f"the checkpoint's random state is of {family or 'another device family'}, not of {device.backend.name}: its "
        f"generator starts anew from seed {seed}, so dropout draws other numbers than it would have there"
    )


def _bytes(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(tensor: torch.Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))
