"""Responses of steps to come as tensors of a checkpoint: ragged values, with JSON values beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hwgrpo.ragged import Ragged

_JSON = "words"
"""Suffix of the JSON values, as bytes."""


def pack(prefix: str, values: Sequence[Ragged], further: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return ragged values and further JSON values as tensors, their names with a prefix; `values_json` reads these."""
    tensors: dict[str, torch.Tensor] = {}
    values_json = {**further}
    for value in values:
        of_value, json_of_value = value.to_tensors(prefix)
        tensors |= of_value
        values_json |= json_of_value
    tensors[prefix + _JSON] = torch.tensor(list(json.dumps(values_json).encode()), dtype=torch.uint8)
    return tensors


def values_json(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any] | None:
    """Return all JSON values that `pack` packed; None if there is nothing under this prefix."""
    packed = tensors.get(prefix + _JSON)
    return None if packed is None else json.loads(bytes(packed.tolist()))
