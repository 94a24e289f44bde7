"""The lean decode step: a token per row with as few operations as the architecture allows.

The model's own forward computes the prompts, and their images. After that only parameters are read, from the modules of
its text model at every `generate`, so that in-place updates of an optimizer take effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hwgrpo.models.lm_head import causal_lm
from hwgrpo.models.placeholders import BANNED, placeholder_ids
from hwgrpo.rollout.local.adapted_linear import Projection, read_projection
from hwgrpo.rollout.local.architectures import Block, Norm, architecture_of, read_block, read_norm, read_norms
from hwgrpo.rollout.local.continued_prefill import prefill_after
from hwgrpo.rollout.local.decode_rows import COMPACT_BELOW, ModelRows, shift_of
from hwgrpo.rollout.local.kernel_fallback import step_kernels
from hwgrpo.rollout.local.packed_weights import PackedWeights
from hwgrpo.rollout.local.shared_prefix_attention import ParkedRow, SharedPromptCache, StepPlaces


class LeanRows:
    """Rows decoded by the lean step, of a model without `unsupported_reason`; see `Rows` for the methods.

    Args:
        model: in evaluation mode, on `device`.
        device: where the model is.
        fixed: let `compute` run the same operations on the same tensors between two `advance` calls that return True,
            as a recording needs; a little slower without one.
        kernels: use the kernels that the registry selects for the device; otherwise torch's operations.
        room: most tokens that a row will have beyond its prompt; 0: unknown.
        packed: makes the products with weights; None: torch does.
    """

    compact_below = COMPACT_BELOW
    refills = parks = True

    def __init__(
        self,
        model: Any,
        device: torch.device,
        fixed: bool = False,
        *,
        kernels: bool = True,
        room: int = 0,
        packed: PackedWeights | None = None,
    ) -> None:
        architecture = architecture_of(model)
        assert architecture is not None
        self._architecture = architecture
        self._model = model
        base = causal_lm(model)
        self._device = device
        self._kernels = step_kernels(model, device) if kernels else None
        self._cache = SharedPromptCache(fixed, None if self._kernels is None else self._kernels.attention, room)
        self._cos = self._sin = torch.empty(0)
        self._decoder: Any = base.get_decoder()
        self._blocks: list[Block] = [read_block(layer, architecture) for layer in self._decoder.layers]
        self._norm: Norm = read_norm(self._decoder.norm, architecture)
        self._embed: nn.Module = base.get_input_embeddings()
        self._head: Projection = read_projection(base.get_output_embeddings())
        if self._kernels is not None and self._kernels.norm is not None:
            self._norm = replace(self._norm, kernel=self._kernels.norm)
            self._blocks = [block.normed_by(self._kernels.norm) for block in self._blocks]
        self._packed = packed
        if packed is not None:
            self._blocks = [block.by_packed(packed) for block in self._blocks]
            self._head = self._head.by_packed(packed)
        banned = placeholder_ids(base.config)
        self._banned = torch.tensor(banned, device=device) if banned else None
        config = base.config.get_text_config()
        self._embedding_multiplier: float = getattr(config, "embedding_multiplier", 1.0)
        self._residual_multiplier: float = getattr(config, "residual_multiplier", 1.0)
        self._logits_scaling: float = getattr(config, "logits_scaling", 1.0)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        rows = ModelRows(self._model, self._device)
        _, logits = rows.prefill(prompts)
        layers: list[Any] = rows.cache.layers
        lengths, shifts = np.array([len(prompt) for prompt in prompts]), self._shifts(prompts)
        keys, values = [layer.keys for layer in layers], [layer.values for layer in layers]
        return self._cache.add_prompts(keys, values, lengths, shifts).tolist(), logits

    def free(self, numbers: list[int]) -> None:
        self._cache.free(numbers)

    def park(self, source: int, length: int) -> ParkedRow:
        return self._cache.park(source, length)

    def extend(self, rows: Sequence[ParkedRow], sequences: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        longer, logits = prefill_after(self._model, self._device, rows, sequences)
        return self._cache.add_parked(longer, self._shifts(sequences)).tolist(), logits

    def _shifts(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        return np.array([shift_of(sequence) for sequence in sequences])

    def arrange(self, source: np.ndarray, left: np.ndarray) -> None:
        self._cache.arrange(source, left)

    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        self.advance()
        return self.compute(token_B)

    def weights_changed(self) -> None:
        if self._packed is not None:
            self._packed.refresh()
        pairs = [(self._norm, read_norm(self._decoder.norm, self._architecture))]
        for layer, block in zip(self._decoder.layers, self._blocks, strict=True):
            norms = read_norms(layer, self._architecture)
            pairs += [(getattr(block, name), norm) for name, norm in norms.items() if norm is not None]
        for held, current in pairs:
            if held.weight is not current.weight:  # in place: a recording may read it
                held.weight.copy_(current.weight)

    def advance(self) -> bool:
        """Advance each response by a token; return whether `compute` uses other tensors than before."""
        moved = self._cache.advance()
        if len(self._cos) < self._cache.longest:
            self._make_rotations()
            moved = True
        return moved

    def compute(self, token_B: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, V] after the newest tokens; may be repeated after one `advance`."""
        step = self._rotated_places() if self._kernels is None else None
        hidden = self._embed(token_B)
        if self._embedding_multiplier != 1.0:
            hidden = hidden * self._embedding_multiplier
        for layer, block in enumerate(self._blocks):
            if self._architecture.norms_after:
                hidden += block.attention_norm(block.output(self._attention(layer, block, hidden, step)))
                hidden += block.mlp_norm(block.down(self._gated(hidden, block)))
            else:
                heads = self._attention(layer, block, block.attention_norm(hidden), step)
                # The residual sums are part of the products.
                block.output.add_to(hidden, heads, self._residual_multiplier)
                block.down.add_to(hidden, self._gated(block.mlp_norm(hidden), block), self._residual_multiplier)
        logits = self._head(self._norm(hidden))
        if self._banned is not None:
            logits.index_fill_(1, self._banned, BANNED)
        return logits / self._logits_scaling if self._logits_scaling != 1.0 else logits

    def _rotated_places(self) -> _RotatedPlaces:
        places = self._cache.places()
        return _RotatedPlaces(places, self._cos[places.positions], self._sin[places.positions])

    def _attention(self, layer: int, block: Block, hidden: torch.Tensor, step: _RotatedPlaces | None) -> torch.Tensor:
        """Return the input of the output projection, [B, query heads * D]; `step` is None with kernels."""
        rows, size = len(hidden), self._cos.shape[-1]
        projected, keys = block.query_key_value(hidden), block.key_size
        both, value = projected[:, :-keys], projected[:, -keys:].view(rows, -1, size)
        if block.query_norm is not None and block.key_norm is not None:
            both = torch.cat((block.query_norm(both[:, :-keys]), block.key_norm(both[:, -keys:])), dim=1)
        # Queries and keys are normed and rotated as one tensor of heads: half the operations.
        both, key_heads = both.view(rows, -1, size), keys // size
        if block.head_norm is not None:
            both = block.head_norm(both)
        if step is None:
            query, key = both[:, :-key_heads], both[:, -key_heads:]
            return self._cache.attend_in_kernel(layer, query, key, value, self._cos, self._sin, block.scaling)
        both = both.to(step.cos.dtype)
        # rotate_half(x) * sin is the halves swapped times sin, the first half of it negative (`_make_rotations`).
        both = torch.addcmul(both * step.cos, both.roll(size // 2, dims=-1), step.sin).to(value.dtype)
        query, key = both[:, :-key_heads], both[:, -key_heads:]
        return self._cache.attend(layer, query, key, value, block.scaling, step.places)

    def _gated(self, hidden: torch.Tensor, block: Block) -> torch.Tensor:
        gate, up = block.gate_up(hidden).chunk(2, dim=1)
        if self._kernels is not None and self._kernels.gate is not None:
            return self._kernels.gate(gate, up)
        return block.activation(gate).mul_(up)

    def _make_rotations(self) -> None:
        """Tabulate cosines and sines of all positions of prompts and buffers: [positions, D], for kernels.

        For torch's operations they are [positions, 1, D], and the first half of the sines is negative.
        """
        positions = torch.arange(self._cache.longest, device=self._device)
        cos, sin = self._decoder.rotary_emb(self._head.weight[:1], positions[None])
        if self._kernels is not None:
            self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
            return
        half = cos.shape[-1] // 2
        self._cos = cos[0][:, None]
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)[:, None]


class _RotatedPlaces(NamedTuple):
    """Of a step by torch's operations: where the newest tokens stand, and the angles there, [B, 1, D]."""

    places: StepPlaces
    cos: torch.Tensor
    sin: torch.Tensor
