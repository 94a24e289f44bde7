"""The lean decode step: a token for each row with as few operations as the architecture allows.

The model's own forward computes the prompts. After that only parameters are read, straight from its modules at every
`generate`, so that what an optimizer wrote in place is what samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hwgrpo.rollout.architectures import Block, Norm, architecture_of, block_of, norm_of, obstacle
from hwgrpo.rollout.rows import TRIAL_LENGTH, TRIAL_PROMPTS, TRIAL_STEPS, LeftPadded, ModelRows, Rows
from hwgrpo.rollout.shared_prompt import SharedPromptCache


class LeanRows:
    """Rows of a model without `architectures.obstacle`, decoded by the lean step; see `Rows` for the methods.

    Args:
        model: in evaluation mode, on `device`.
        prompts: G sequences of token ids, none empty.
        device: where the model is.
        max_response_tokens: most tokens that will be appended to a prompt.
    """

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], device: torch.device, max_response_tokens: int
    ) -> None:
        architecture = architecture_of(model)
        assert architecture is not None
        self._architecture = architecture
        self._model = model
        self._device = device
        self._max_response_tokens = max_response_tokens
        self._prompts = prompts
        self._blocks: list[Block] = [block_of(layer, architecture) for layer in model.model.layers]
        self._norm: Norm = norm_of(model.model.norm, architecture)
        self._embed: nn.Module = model.get_input_embeddings()
        self._head: nn.Linear = model.get_output_embeddings()
        config = model.config
        self._embedding_multiplier: float = getattr(config, "embedding_multiplier", 1.0)
        self._residual_multiplier: float = getattr(config, "residual_multiplier", 1.0)
        self._logits_scaling: float = getattr(config, "logits_scaling", 1.0)

    def prefill(self) -> torch.Tensor:
        rows = ModelRows(self._model, self._prompts, self._device)
        logits = rows.prefill()
        padded = LeftPadded(self._prompts, self._device)
        layers: list[Any] = rows.cache.layers
        self._cache = SharedPromptCache(
            [layer.keys for layer in layers],
            [layer.values for layer in layers],
            padded.mask,
            self._max_response_tokens,
        )
        self._length_of_prompt = padded.lengths
        self._width = padded.width
        return logits

    def spread(self, prompt_of: np.ndarray) -> None:
        self._cache.spread(prompt_of)
        self._position = self._length_of_prompt[torch.from_numpy(prompt_of).to(self._device)]
        self._make_rotations()

    def select(self, kept: np.ndarray) -> None:
        self._cache.select(kept)
        self._position = self._position[torch.from_numpy(kept).to(self._device)]

    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        capacity = self._cache.capacity
        self._cache.advance()
        if self._cache.capacity != capacity:
            self._make_rotations()
        cos, sin = self._cos[self._position], self._sin[self._position]
        self._position = self._position + 1
        hidden = self._embed(token_B)
        if self._embedding_multiplier != 1.0:
            hidden = hidden * self._embedding_multiplier
        for layer, block in enumerate(self._blocks):
            if self._architecture.norms_after:
                hidden += block.attention_norm(_linear(self._attention(layer, block, hidden, cos, sin), block.output))
                hidden += block.mlp_norm(_linear(_gated(hidden, block), block.down))
            else:
                heads = self._attention(layer, block, block.attention_norm(hidden), cos, sin)
                _add_linear(hidden, heads, block.output, self._residual_multiplier)
                _add_linear(hidden, _gated(block.mlp_norm(hidden), block), block.down, self._residual_multiplier)
        logits = _linear(self._norm(hidden), self._head)
        return logits / self._logits_scaling if self._logits_scaling != 1.0 else logits

    def _attention(
        self, layer: int, block: Block, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Return what the output projection takes, [B, query heads * D]; `cos` and `sin` are [B, 1, D]."""
        rows, size = len(hidden), cos.shape[-1]
        query, key, value = (_linear(hidden, projection) for projection in (block.query, block.key, block.value))
        if block.query_norm is not None and block.key_norm is not None:
            query, key = block.query_norm(query), block.key_norm(key)
        # Queries and keys are normed and rotated as one tensor of heads: half the operations.
        both = torch.cat((query, key), dim=1).view(rows, -1, size)
        key_heads = key.shape[1] // size
        if block.head_norm is not None:
            both = block.head_norm(both)
        both = both.to(cos.dtype)
        # rotate_half(x) * sin is the halves swapped times sin, the first half of it negative (`_make_rotations`).
        both = torch.addcmul(both * cos, both.roll(size // 2, dims=-1), sin).to(value.dtype)
        query, key = both[:, :-key_heads], both[:, -key_heads:]
        return self._cache.attend(layer, query, key, value.view(rows, key_heads, size), block.scaling)

    def _make_rotations(self) -> None:
        """Tabulate cosines and sines for all positions that the buffers have room for, [positions, 1, D]."""
        positions = torch.arange(self._width + self._cache.capacity, device=self._device)
        cos, sin = self._model.model.rotary_emb(self._head.weight[:1], positions[None])
        half = cos.shape[-1] // 2
        self._cos = cos[0][:, None]
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)[:, None]


def _linear(hidden: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    return F.linear(hidden, layer.weight, layer.bias)


def _add_linear(total: torch.Tensor, hidden: torch.Tensor, layer: nn.Linear, factor: float) -> None:
    """Add factor * layer(hidden) to `total` in place."""
    total.addmm_(hidden, layer.weight.t(), alpha=factor)
    if layer.bias is not None:
        total.add_(layer.bias, alpha=factor)


def _gated(hidden: torch.Tensor, block: Block) -> torch.Tensor:
    return block.activation(_linear(hidden, block.gate)).mul_(_linear(hidden, block.up))


def proven(model: PreTrainedModel, device: torch.device) -> str | None:
    """Decode a few tokens both ways, with unequal prompts and a row dropped; say why the lean step cannot be used.

    Args:
        model: in evaluation mode, on `device`.
        device: where the model is.
    """
    reason = obstacle(model, TRIAL_LENGTH)
    if reason is not None:
        return reason
    embeddings: Any = model.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    prompts = [[token % vocabulary for token in prompt] for prompt in TRIAL_PROMPTS]
    try:
        expected = _trial(ModelRows(model, prompts, device), device, vocabulary)
        found = _trial(LeanRows(model, prompts, device, TRIAL_STEPS), device, vocabulary)
    except (AttributeError, TypeError, RuntimeError) as error:  # modules that are not built as in the tested versions
        return f"its layers are not as expected ({type(error).__name__}: {str(error).splitlines()[0]})"
    gap = float((found - expected).abs().max() / expected.abs().max())
    # What rounding explains: in fp32 products may be taken in TF32, in bf16 every operation rounds to 3 digits.
    tolerance = max(1e-3, 8 * torch.finfo(next(model.parameters()).dtype).eps)
    return None if gap <= tolerance else f"its logits would differ by {gap:.2g}"


def _trial(rows: Rows, device: torch.device, vocabulary: int) -> torch.Tensor:
    rows.prefill()
    rows.spread(np.array([0, 0, 1]))
    logits = []
    for step in range(TRIAL_STEPS):
        if step == TRIAL_STEPS - 1:
            rows.select(np.array([1, 2]))
        tokens = torch.arange(2 if step == TRIAL_STEPS - 1 else 3, device=device) + 9 + step
        logits.append(rows.step(tokens % vocabulary).float())
    return torch.cat(logits)
