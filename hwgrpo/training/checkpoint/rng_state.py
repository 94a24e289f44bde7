"""The random state of a process as uint8 tensors: torch's host and device generators, numpy's and Python's."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from hwgrpo_backends.device import Device

from hwgrpo.rewards.randomness import GENERATORS


def capture(device: Device) -> dict[str, torch.Tensor]:
    """Return the state of every random generator of this process.

    Dropout and users' reward functions may use them. Sampling does not: its random numbers are a function of seed,
    prompt and position.
    """
    with GENERATORS:  # a thread that scores beside the training seeds them for a while
        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        return {
            "torch": torch.get_rng_state(),
            "device": device.rng_state().cpu(),
            "family": _bytes(device.backend.name),
            "python": _bytes(random.getstate()),
            "numpy": _bytes([kind, np.asarray(keys).tolist(), position, has_gauss, gauss]),
        }


def restore(state: Mapping[str, torch.Tensor], device: Device, seed: int) -> str | None:
    """Restore every generator to a state from `capture`.

    Device families have different generators: on a family other than the state's, the device's generator is seeded
    with `seed` instead.

    Returns:
        A note if that happened, else None.
    """
    # Older checkpoints do not record the family: a state of another length is of another family.
    family = _value(state["family"]) if "family" in state else None
    same = state["device"].numel() == device.rng_state().numel() if family is None else family == device.backend.name
    if not same:
        device.manual_seed(seed)  # also seeds the host's generator, whose state is restored below
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
        f"generator is seeded with {seed}, so dropout draws other numbers than it would have there"
    )


def _bytes(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(tensor: torch.Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))
