"""The map from raw logits to the distribution's logits: logit scale, softcap, temperature."""

from typing import NamedTuple

import torch
from torch import Tensor


class LogitMap(NamedTuple):
    """z' = scale * row_scale * (tanh(squash * z) if squash else z), in the form of the row ops' arguments.

    Model scale a, softcap c and temperature T give z' = c tanh(a z / c) / T: the cap comes before the temperature, as
    in transformers' Gemma.

    Args:
        scale: positive factor.
        squash: factor inside tanh; 0 means no softcap.
        row_scale_N: [N] positive factor per row (1/T of that row), or None.
    """

    scale: float = 1.0
    squash: float = 0.0
    row_scale_N: Tensor | None = None

    def rows(self, start: int, stop: int) -> "LogitMap":
        """Return the map of rows [start, stop)."""
        return self if self.row_scale_N is None else self._replace(row_scale_N=self.row_scale_N[start:stop])

    def select(self, index: Tensor) -> "LogitMap":
        """Return the map of the rows in `index`."""
        return self if self.row_scale_N is None else self._replace(row_scale_N=self.row_scale_N[index])


def logit_map(temperature: float | Tensor, softcap: float | None, logit_scale: float) -> LogitMap:
    """Build the map from (checked) arguments of the public ops."""
    row_scale = None
    scale = logit_scale if softcap is None else softcap
    squash = 0.0 if softcap is None else logit_scale / softcap
    if isinstance(temperature, Tensor):
        row_scale = temperature.detach().to(torch.promote_types(temperature.dtype, torch.float32)).reciprocal()
    else:
        scale = scale / temperature
    return LogitMap(float(scale), float(squash), row_scale)
