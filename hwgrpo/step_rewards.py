"""The rewards of the steps of responses, for process supervision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hwgrpo.ragged import Ragged, per_token

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StepRewards(Ragged):
    """The rewards of the K steps of S responses, ragged; every response has at least one step."""

    rewards: torch.Tensor = field(metadata=per_token())
    """[K] fp64: weighted sums; meaningless where the response is not valid."""
    ends: torch.Tensor = field(metadata=per_token())
    """[K] int64: index of a step's last token in its response, not descending; -1 in a response without tokens."""
    offsets: torch.Tensor
    """[S + 1] int64: the steps of response i are `offsets[i]:offsets[i + 1]`."""
