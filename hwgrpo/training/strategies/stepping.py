"""Backward and step of the strategies that use torch's own optimizer."""

from __future__ import annotations

import torch


class Stepping:
    """Ordinary backward and optimizer step; see `Strategy` for the methods."""

    optimizer: torch.optim.Optimizer

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.discard_gradients()

    def discard_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
