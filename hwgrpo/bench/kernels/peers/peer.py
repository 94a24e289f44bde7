"""What an adapter of another project's kernel offers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from hwgrpo_kernels import Shape
from torch import Tensor

Score = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(hidden [N,H], weight [V,H], targets [N]) -> logprob [N], entropy [N] or None; differentiable in the first two."""
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(hidden [N,H], weight [V,H], targets [N], advantages [S]) -> mean over tokens of the GRPO loss at ratio 1."""


@dataclass(frozen=True)
class Peer:
    """Another project's kernel.

    Args:
        name: what people call it.
        distribution: what to install.
        modules: which must be importable, looked for and not imported.
        cannot: (device type, dtype, shape) -> why it cannot run, or nothing.
        score: imports it and returns its function, of which the loss is made too; None where it has a loss only.
        loss: imports it and returns its own loss.
    """

    name: str
    distribution: str
    modules: tuple[str, ...]
    cannot: Callable[[str, torch.dtype, Shape], str]
    score: Callable[[], Score] | None = None
    loss: Callable[[], Loss] | None = None

    @property
    def missing(self) -> str:
        """Which module is not installed, or nothing."""
        return next((name for name in self.modules if importlib.util.find_spec(name) is None), "")

    @property
    def version(self) -> str | None:
        """Its installed version."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None


def anywhere(device_type: str, dtype: torch.dtype, shape: Shape) -> str:
    """Say that nothing stands against it."""
    return ""


def needs_triton_device(device_type: str) -> str:
    """Say why a Triton kernel cannot run on the host's processor."""
    return "its Triton kernels need an accelerator" if device_type == "cpu" else ""
