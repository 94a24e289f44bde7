"""Time steps of state-space layers (Mamba 2) without limits, as sampling computes them.

transformers' full forward clamps a layer's time step to `time_step_limit` (for Zamba 2 and Nemotron-H at least
`time_step_min`); its forward of a single token with a cache does not, nor does vLLM. With limits, tokens would be
sampled by another model than the one that is trained.
"""

from __future__ import annotations

import math
from typing import Any

import torch

UNLIMITED = (0.0, math.inf)
"""`time_step_limit` without effect: time steps are positive."""


def lift_time_step_limits(model: torch.nn.Module) -> None:
    """Remove the limits of time steps in all layers of a model; its configuration keeps them."""
    for module in model.modules():
        limit: Any = getattr(module, "time_step_limit", None)
        if limit is not None and tuple(limit) != UNLIMITED:
            module.lifted_time_step_limit = tuple(limit)  # type: ignore[assignment]
            module.time_step_limit = UNLIMITED  # type: ignore[assignment]


def time_step_note(model: torch.nn.Module) -> str | None:
    """Return a line about the limits that were removed from a model, None if it had none."""
    limits: set[Any] = {getattr(module, "lifted_time_step_limit", None) for module in model.modules()} - {None}
    if not limits:
        return None
    described = " and ".join(f"[{low:g}, {high:g}]" for low, high in sorted(limits))
    return (
        f"time steps of state-space layers are not limited to {described}: a token is sampled without this limit, by "
        "transformers' step with a cache and by vLLM, so training leaves it out too; transformers' full forward of the "
        "saved model would apply it"
    )
