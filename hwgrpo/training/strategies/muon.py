"""Muon for the matrices of the decoder layers, AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hwgrpo.models.layers import decoder_layers

MOMENTUM = "momentum_buffer"
"""Muon's state of every element."""


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` as one optimizer with one learning rate.

    Muon's updates are scaled to the root mean square of AdamW's (`match_rms_adamw`, Liu et al. 2025, arXiv 2502.16982),
    so that a learning rate for AdamW serves both.

    Args:
        matrices: parameters for Muon, of two dimensions.
        others: parameters for AdamW, in groups with their weight decay.
        optim: the `optim` section of the configuration.
        fused: as for AdamW.
    """

    def __init__(
        self, matrices: Sequence[nn.Parameter], others: list[dict[str, Any]], optim: Any, *, fused: bool | None
    ) -> None:
        muon = torch.optim.Muon(
            matrices,
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            momentum=optim.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self.parts: list[torch.optim.Optimizer] = [muon]
        if others:
            betas = optim.betas[0], optim.betas[1]
            self.parts.append(torch.optim.AdamW(others, lr=optim.lr, betas=betas, eps=optim.eps, fused=fused))
        super().__init__([group for part in self.parts for group in part.param_groups], {"fused": fused})
        for part in self.parts:
            part.state = self.state
        self._matrices = {id(matrix) for matrix in matrices}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()

    def has_momentum(self, parameter: torch.Tensor) -> bool:
        """Return whether Muon updates a parameter."""
        return id(parameter) in self._matrices


def muon_adamw(trainable: Sequence[nn.Parameter], module: Any, optim: Any, *, fused: bool | None) -> MuonAdamW:
    """Return the optimizer of a policy's trainable parameters.

    Args:
        trainable: parameters that need gradients.
        module: the policy (`PolicyModel`).
        optim: the `optim` section of the configuration.
        fused: as for AdamW.
    """
    in_layers = {id(p) for layer in decoder_layers(module.base) for p in layer.parameters() if p.dim() == 2}
    rest = [p for p in trainable if id(p) not in in_layers]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    matrices = [p for p in trainable if id(p) in in_layers]
    return MuonAdamW(matrices, [group for group in groups if group["params"]], optim, fused=fused)
