"""The random state of a process as uint8 tensors: torch's host and device generators, numpy's and Python's."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

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
        "python": _bytes(random.getstate()),
        "numpy": _bytes([kind, np.asarray(keys).tolist(), position, has_gauss, gauss]),
    }


def restore(state: Mapping[str, torch.Tensor], device: Device) -> None:
    """Put every generator into a state that `capture` returned."""
    torch.set_rng_state(state["torch"])
    device.set_rng_state(state["device"])
    version, internal, gauss = _value(state["python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = _value(state["numpy"])
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))


def _bytes(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(tensor: torch.Tensor) -> list:
    return json.loads(bytes(tensor.tolist()))
