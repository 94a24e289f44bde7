"""Backward and step of the strategies that use torch's own optimizer."""

from __future__ import annotations

import torch

from hwgrpo.training.strategies.held_adamw import HeldAdamW, gradient_of


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

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of this rank's elements of a parameter, on its device or the host; None: it has none."""
        return gradient_of(self.optimizer, parameter)

    def set_zero_gradient(self, parameter: torch.Tensor) -> None:
        """Give a parameter without a gradient one of zeros."""
        parameter.grad = torch.zeros_like(parameter)
        if isinstance(self.optimizer, HeldAdamW) and self.optimizer.host_gradients is not None:
            self.optimizer.host_gradients.add(parameter)

    def discard_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
