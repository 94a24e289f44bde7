"""Kernels that the lean step uses in place of torch's operations, and the fallback where their startup check fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hwgrpo_kernels import resolve
from transformers import PreTrainedModel

from hwgrpo.models.lm_head import causal_lm

SILU = ("SiLU", "SiLUActivation")
"""Classes of activations that `swiglu` computes."""


@dataclass(frozen=True)
class StepKernels:
    """Kernels of a decode step; `hwgrpo_kernels.decode_definitions` says what they compute."""

    attention: Callable[..., torch.Tensor]
    """The op `decode_attention`."""
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    """The op `swiglu`; None: torch's operations."""


def step_kernels(model: PreTrainedModel, device: torch.device) -> StepKernels | None:
    """Return the kernels that the registry selects for a model's decode step; None: torch's operations.

    Args:
        model: of an architecture that the lean step supports.
        device: where the model is.

    Raises:
        ValueError: a pinned implementation cannot run.
    """
    base = causal_lm(model)
    dtype = base.get_output_embeddings().weight.dtype
    layer, text = base.get_decoder().layers[0], base.config.get_text_config()
    attention = resolve("decode_attention", device.type, dtype, layer.self_attn.head_dim)
    if attention.name == "torch":
        return None
    activation = type(layer.mlp.act_fn).__name__
    gate = resolve("swiglu", device.type, dtype, text.intermediate_size) if activation in SILU else None
    return StepKernels(attention.function, None if gate is None or gate.name == "torch" else gate.function)


class DecodeKernels:
    """Whether the lean step uses the kernels that the registry selects: until a startup check fails with them.

    Args:
        check: (model, device) -> why decoding with the kernels differs or fails, or None; `check_lean_step`.
    """

    def __init__(self, check: Callable[[PreTrainedModel, torch.device], str | None]) -> None:
        self._check = check
        self.active = True
        """Whether they are used, where the registry selects some."""
        self.note = ""
        """Why torch's operations decode although there are kernels; empty: they do not, or there are none."""

    def check(self, model: PreTrainedModel, device: torch.device) -> None:
        """Use torch's operations from here on if decoding a few tokens with the kernels fails or gives other logits."""
        if step_kernels(model, device) is None:
            self.active = False
            return
        reason = self._check(model, device)
        if reason is not None:
            self.stop(reason)

    def stop(self, reason: str) -> None:
        """Use torch's operations from here on."""
        self.active = False
        self.note = f"rollout decodes by torch's operations without the kernels decode_attention and swiglu: {reason}"
