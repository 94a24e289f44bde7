"""The lean decode step: a token per row with as few operations as the architecture allows.

The model's own forward computes the prompts. After that only parameters are read, from its modules at every `generate`,
so that in-place updates of an optimizer take effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hwgrpo.models.lm_head import causal_lm
from hwgrpo.rollout.local.adapted_linear import Projection, read_projection
from hwgrpo.rollout.local.architectures import Block, Norm, architecture_of, read_block, read_norm
from hwgrpo.rollout.local.decode_rows import COMPACT_BELOW, ModelRows
from hwgrpo.rollout.local.shared_prefix_attention import SharedPromptCache, StepPlaces


class LeanRows:
    """Rows decoded by the lean step, of a model without `unsupported_reason`; see `Rows` for the methods.

    Args:
        model: in evaluation mode, on `device`.
        device: where the model is.
        fixed: let `compute` run the same operations on the same tensors between two `advance` calls that return True,
            as a recording needs; a little slower without one.
    """

    compact_below = COMPACT_BELOW
    refills = True

    def __init__(self, model: Any, device: torch.device, fixed: bool = False) -> None:
        architecture = architecture_of(model)
        assert architecture is not None
        self._architecture = architecture
        self._model = model
        base = causal_lm(model)
        self._base = base
        self._device = device
        self._cache = SharedPromptCache(fixed)
        self._cos = self._sin = torch.empty(0)
        self._blocks: list[Block] = [read_block(layer, architecture) for layer in base.model.layers]
        self._norm: Norm = read_norm(base.model.norm, architecture)
        self._embed: nn.Module = base.get_input_embeddings()
        self._head: Projection = read_projection(base.get_output_embeddings())
        config = base.config
        self._embedding_multiplier: float = getattr(config, "embedding_multiplier", 1.0)
        self._residual_multiplier: float = getattr(config, "residual_multiplier", 1.0)
        self._logits_scaling: float = getattr(config, "logits_scaling", 1.0)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        rows = ModelRows(self._model, self._device)
        _, logits = rows.prefill(prompts)
        layers: list[Any] = rows.cache.layers
        lengths = np.array([len(prompt) for prompt in prompts])
        keys, values = [layer.keys for layer in layers], [layer.values for layer in layers]
        return self._cache.add_prompts(keys, values, lengths).tolist(), logits

    def free(self, numbers: list[int]) -> None:
        self._cache.free(numbers)

    def arrange(self, source: np.ndarray, left: np.ndarray) -> None:
        self._cache.arrange(source, left)

    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        self.advance()
        return self.compute(token_B)

    def advance(self) -> bool:
        """Advance each response by a token; return whether `compute` uses other tensors than before."""
        moved = self._cache.advance()
        if len(self._cos) < self._cache.longest:
            self._make_rotations()
            moved = True
        return moved

    def compute(self, token_B: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, V] after the newest tokens; may be repeated after one `advance`."""
        places = self._cache.places()
        cos, sin = self._cos[places.positions], self._sin[places.positions]
        hidden = self._embed(token_B)
        if self._embedding_multiplier != 1.0:
            hidden = hidden * self._embedding_multiplier
        for layer, block in enumerate(self._blocks):
            if self._architecture.norms_after:
                hidden += block.attention_norm(block.output(self._attention(layer, block, hidden, cos, sin, places)))
                hidden += block.mlp_norm(block.down(_gated(hidden, block)))
            else:
                heads = self._attention(layer, block, block.attention_norm(hidden), cos, sin, places)
                block.output.add_to(hidden, heads, self._residual_multiplier)
                block.down.add_to(hidden, _gated(block.mlp_norm(hidden), block), self._residual_multiplier)
        logits = self._head(self._norm(hidden))
        return logits / self._logits_scaling if self._logits_scaling != 1.0 else logits

    def _attention(
        self,
        layer: int,
        block: Block,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        places: StepPlaces,
    ) -> torch.Tensor:
        """Return the input of the output projection, [B, query heads * D]; `cos` and `sin` are [B, 1, D]."""
        rows, size = len(hidden), cos.shape[-1]
        projected, keys = block.query_key_value(hidden), block.key_size
        both, value = projected[:, :-keys], projected[:, -keys:]
        if block.query_norm is not None and block.key_norm is not None:
            both = torch.cat((block.query_norm(both[:, :-keys]), block.key_norm(both[:, -keys:])), dim=1)
        # Queries and keys are normed and rotated as one tensor of heads: half the operations.
        both, key_heads = both.view(rows, -1, size), keys // size
        if block.head_norm is not None:
            both = block.head_norm(both)
        both = both.to(cos.dtype)
        # rotate_half(x) * sin is the halves swapped times sin, the first half of it negative (`_make_rotations`).
        both = torch.addcmul(both * cos, both.roll(size // 2, dims=-1), sin).to(value.dtype)
        query, key = both[:, :-key_heads], both[:, -key_heads:]
        return self._cache.attend(layer, query, key, value.view(rows, key_heads, size), block.scaling, places)

    def _make_rotations(self) -> None:
        """Tabulate cosines and sines of all positions of prompts and buffers, [positions, 1, D]."""
        positions = torch.arange(self._cache.longest, device=self._device)
        cos, sin = self._base.model.rotary_emb(self._head.weight[:1], positions[None])
        half = cos.shape[-1] // 2
        self._cos = cos[0][:, None]
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)[:, None]


def _gated(hidden: torch.Tensor, block: Block) -> torch.Tensor:
    gate, up = block.gate_up(hidden).chunk(2, dim=1)
    return block.activation(gate).mul_(up)
