"""What a rank holds of the policy's state, in terms that all strategies share: runs of a parameter's elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of every element."""


@dataclass(frozen=True)
class Piece:
    """A run of one trainable parameter's elements, with AdamW's moments of them, as one rank holds it.

    Elements are counted in the parameter's row-major order. The tensors are the live ones or views of them: who writes
    into them changes what the next step computes with.
    """

    name: str
    """Of the parameter, in the model that the policy wraps."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """The first element held."""
    values: dict[str, torch.Tensor]
    """`parameter`, and once there is an optimizer `exp_avg` and `exp_avg_sq`: [count] each."""
    step: torch.Tensor | None = None
    """Updates that the parameter has seen, AdamW's own counter: one number."""

    @property
    def count(self) -> int:
        """How many elements are held; 0 where other ranks hold them all."""
        return self.values["parameter"].numel()

    @property
    def whole(self) -> bool:
        """Whether nobody else holds a part of the parameter."""
        return self.count == math.prod(self.shape)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements [count] in row-major order, as a view of it."""
    assert tensor.is_contiguous(), "a view in row-major order needs a contiguous tensor"
    return tensor.detach().view(-1)


def whole_pieces(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Piece]:
    """Return the trainable parameters of a module that is in one piece, each as one.

    Args:
        module: holds all of every parameter.
        optimizer: AdamW over them, whose moments are part of the pieces.
    """
    pieces = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            state = moments_of(optimizer, parameter) if optimizer else {}
            values = {"parameter": flat(parameter)} | {key: flat(state[key]) for key in MOMENTS if key in state}
            pieces.append(Piece(name, tuple(parameter.shape), 0, values, state.get("step")))
    return pieces


def moments_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return AdamW's state of a parameter, made as it is before the first update where there is none yet."""
    state = optimizer.state[parameter]
    if not state:
        # AdamW keeps its counter where its implementation wants it: on the device when fused, on the CPU else
        where = parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=where)
        for key in MOMENTS:
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state


def shared_out(pieces: Sequence[Piece], ranks: int) -> list[list[Piece]]:
    """Cut pieces that every rank holds alike into one list for each rank, about equally large.

    Args:
        pieces: in the same order on every rank.
        ranks: how many there are.
    """
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for piece in sorted(pieces, key=lambda piece: -piece.count):  # stable, so that all ranks agree
        least = sizes.index(min(sizes))
        shares[least].append(piece)
        sizes[least] += piece.count
    return shares
