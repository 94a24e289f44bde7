"""Kernels that the lean step uses in place of torch's operations, and the fallback where their startup check fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hwgrpo_kernels import Choice, decode_compiled, host_compiler, resolve
from transformers import PreTrainedModel

from hwgrpo.models.lm_head import causal_lm

SILU = ("SiLU", "SiLUActivation")
"""Classes of activations that `swiglu` computes."""

COMPILED = "compiled"
"""Implementations in C++, for a host processor."""

LEAST_COMPILED = 20_000_000
"""Parameters of a text model from which on compiling pays, which takes a few seconds on a machine's first start."""


@dataclass(frozen=True)
class StepKernels:
    """Kernels of a decode step; `hwgrpo_kernels.decode_definitions` says what they compute."""

    attention: Callable[..., torch.Tensor]
    """The op `decode_attention`."""
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    """The op `swiglu`; None: torch's operations."""
    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] | None
    """(hidden states [B, size], weight [size], epsilon) -> their RMSNorm; None: torch's."""


def step_kernels(model: PreTrainedModel, device: torch.device) -> StepKernels | None:
    """Return the kernels that the registry selects for a model's decode step; None: torch's operations.

    Args:
        model: of an architecture that the lean step supports.
        device: where the model is.

    Raises:
        ValueError: a pinned implementation cannot run.
    """
    base, attention = causal_lm(model), _attention(model, device)
    if attention.name == "torch":
        return None
    if attention.name == COMPILED:
        return StepKernels(attention.function, None, decode_compiled.rms_norm)
    dtype = base.get_output_embeddings().weight.dtype
    layer, text = base.get_decoder().layers[0], base.config.get_text_config()
    activation = type(layer.mlp.act_fn).__name__
    gate = resolve("swiglu", device.type, dtype, text.intermediate_size) if activation in SILU else None
    return StepKernels(attention.function, None if gate is None or gate.name == "torch" else gate.function, None)


def _attention(model: PreTrainedModel, device: torch.device) -> Choice:
    """Return the registry's choice; on a host processor the compiled implementation comes first where it pays."""
    base = causal_lm(model)
    compiles = _gains_by_compiling(model, device) and host_compiler.reason_against() is None
    dtype, size = base.get_output_embeddings().weight.dtype, base.get_decoder().layers[0].self_attn.head_dim
    return resolve("decode_attention", device.type, dtype, size, (COMPILED, "torch") if compiles else None)


def _gains_by_compiling(model: PreTrainedModel, device: torch.device) -> bool:
    decoder = causal_lm(model).get_decoder()
    return device.type == "cpu" and sum(each.numel() for each in decoder.parameters()) >= LEAST_COMPILED


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
            choice = _attention(model, device)
            if choice.pinned_by is None and _gains_by_compiling(model, device):
                missing = host_compiler.reason_against() or dict(choice.skipped).get(COMPILED)
                if missing is not None:
                    self.stop(missing)
            return
        reason = self._check(model, device)
        if reason is not None:
            self.stop(reason)

    def stop(self, reason: str) -> None:
        """Use torch's operations from here on."""
        self.active = False
        self.note = f"rollout decodes by torch's operations without the kernels of a decode step: {reason}"
