"""Attention of one new token per row over a prompt that several rows share and over each row's own response.

Keys and values of a prompt are stored once, those of responses in buffers that are written in place and doubled when
full. Heads are the first dimension, rows the second: the n rows of a prompt are then n times as many queries against
its keys, which is one matrix product, and a view of the same tensor by row multiplies each row's own keys.

Shapes: P prompts of W tokens (padded on the left), B rows, H key-value heads of G queries each, head size D, response
buffers of C tokens of which T are filled.
"""

from __future__ import annotations

import numpy as np
import torch

from hwgrpo.models.shared_prefix_masks import LEAST_COLUMNS

FIRST_CAPACITY = 64
"""Initial capacity of the buffers, in response tokens."""


class SharedPromptCache:
    """Cache of the keys and values of all layers.

    Args:
        keys: per layer [P, H, W, D], rotated.
        values: per layer [P, H, W, D].
        mask: [P, W] bool, False at padding; None where there is none.
        longest: largest number of response tokens that will be appended.
        fixed: attend to full response buffers, masked where they are not filled, so that `attend` runs the same
            operations on the same tensors until `advance`, `spread` or `select` changes them, and can be recorded.
    """

    def __init__(
        self,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        mask: torch.Tensor | None,
        longest: int,
        fixed: bool = False,
    ) -> None:
        self._prompt = [torch.stack([k, v]).transpose(1, 2).contiguous() for k, v in zip(keys, values)]
        self._bias_of_prompt = (
            None if mask is None else torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
        )
        self._longest = longest
        self._fixed = fixed
        self._length = 0
        self._response: list[torch.Tensor] = []
        self._prompt_of = np.empty(0, dtype=np.int64)
        self._slot: torch.Tensor | None = None
        self._per_prompt = 1
        self._bias: torch.Tensor | None = None
        device = self._prompt[0].device
        self._newest = torch.zeros(1, dtype=torch.long, device=device)
        """[1] int64, index of the newest token in the buffers; updated, like the bias below, only if `fixed`."""
        self._bias_of_response = torch.empty(0, device=device)
        """[C] fp32, 0 where the buffers are filled, else -inf."""

    @property
    def capacity(self) -> int:
        """Capacity of the buffers, in response tokens."""
        return self._response[0].shape[3]

    def spread(self, prompt_of: np.ndarray) -> None:
        """Start B empty responses; see `Rows.spread`."""
        capacity = min(FIRST_CAPACITY, self._longest)
        self._response = [self._buffer(prompt, len(prompt_of), capacity, prompt.shape[-1]) for prompt in self._prompt]
        self._arrange(prompt_of)

    def select(self, kept: np.ndarray) -> None:
        """Keep some responses; see `Rows.select`. Prompts without one are dropped."""
        device = self._prompt[0].device
        index = torch.from_numpy(kept).to(device)
        for layer, buffer in enumerate(self._response):
            self._response[layer] = buffer.index_select(2, index)
        used, prompt_of = np.unique(self._prompt_of[kept], return_inverse=True)
        if len(used) < self._prompt[0].shape[2]:
            alive = torch.from_numpy(used).to(device)
            for layer, prompt in enumerate(self._prompt):
                self._prompt[layer] = prompt.index_select(2, alive)
            if self._bias_of_prompt is not None:
                self._bias_of_prompt = self._bias_of_prompt[alive]
        self._arrange(prompt_of)

    def _arrange(self, prompt_of: np.ndarray) -> None:
        """Assign each row a slot in a grid of prompts by rows per prompt."""
        device, prompts = self._prompt[0].device, self._prompt[0].shape[2]
        self._prompt_of = prompt_of
        count = np.bincount(prompt_of, minlength=prompts)
        self._per_prompt = int(count.max())
        by_prompt = np.argsort(prompt_of, kind="stable")
        rank = np.empty_like(prompt_of)
        rank[by_prompt] = np.arange(len(prompt_of)) - (np.cumsum(count) - count)[prompt_of[by_prompt]]
        slot = prompt_of * self._per_prompt + rank
        # Where rows fill the grid in order, as they do until the first has ended, the grid is a view of the rows.
        in_order = len(slot) == prompts * self._per_prompt and np.array_equal(slot, np.arange(len(slot)))
        self._slot = None if in_order else torch.from_numpy(slot).to(device)
        if self._bias_of_prompt is not None:
            self._bias = self._bias_of_prompt[torch.from_numpy(prompt_of).to(device)][:, None]

    def advance(self) -> bool:
        """Append a slot for a token in every layer; return whether the buffers were reallocated."""
        full = self._length == self.capacity
        if full:
            for layer, buffer in enumerate(self._response):
                wider = self._buffer(buffer, buffer.shape[2], min(2 * self._length, self._longest), buffer.shape[4])
                wider[:, :, :, : self._length] = buffer
                self._response[layer] = wider
        if self._fixed:
            if len(self._bias_of_response) != self.capacity:
                self._bias_of_response = self._bias_of_response.new_full((self.capacity,), -torch.inf)
                self._bias_of_response[: self._length] = 0.0
            self._bias_of_response[self._length] = 0.0
            self._newest.fill_(self._length)
        self._length += 1
        return full

    def _buffer(self, like: torch.Tensor, rows: int, capacity: int, size: int) -> torch.Tensor:
        """Return an empty buffer [2, H, B, C, D]; with `fixed` it is read before it is filled, so it is zeroed."""
        make = like.new_zeros if self._fixed else like.new_empty
        return make(2, like.shape[1], rows, capacity, size)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Store the newest token's key and value and return its attention output, after `advance`.

        Idempotent for the same token.

        Args:
            layer: index of the decoder layer.
            query: [B, H * G, D], rotated.
            key: [B, H, D], rotated.
            value: [B, H, D].
            scaling: factor of the scores.

        Returns:
            [B, H * G * D].
        """
        buffer = self._response[layer]
        _, heads, rows, capacity, size = buffer.shape
        length = capacity if self._fixed else self._length
        if self._fixed:
            buffer[0].index_copy_(2, self._newest, key.transpose(0, 1)[:, :, None])
            buffer[1].index_copy_(2, self._newest, value.transpose(0, 1)[:, :, None])
        else:
            buffer[0, :, :, length - 1] = key.transpose(0, 1)
            buffer[1, :, :, length - 1] = value.transpose(0, 1)
        own_key, own_value = buffer.flatten(1, 2)[:, :, :length]
        prompt_key, prompt_value = self._prompt[layer]
        width = prompt_key.shape[2]
        group = query.shape[1] // heads
        query = query.reshape(rows, heads, group, size).transpose(0, 1).contiguous()

        # Scores are fp32 whatever the dtype: a softmax in half precision would not be the trainer's.
        columns = max(width + length, LEAST_COLUMNS)
        scores = torch.empty(heads, rows, group, columns, dtype=torch.float32, device=query.device)
        scores[..., width + length :] = -torch.inf
        of_prompt = self._to_grid(query).flatten(1, 2).view(-1, self._per_prompt * group, size)
        of_prompt = self._from_grid(torch.bmm(of_prompt, prompt_key.flatten(0, 1).transpose(1, 2)), rows, group)
        if self._bias is None:
            torch.mul(of_prompt, scaling, out=scores[..., :width])
        else:
            torch.add(self._bias, of_prompt, alpha=scaling, out=scores[..., :width])
        of_own = torch.bmm(query.view(heads * rows, group, size), own_key.transpose(1, 2))
        of_own = of_own.view(heads, rows, group, length)
        if self._fixed:
            torch.add(self._bias_of_response, of_own, alpha=scaling, out=scores[..., width : width + length])
        else:
            torch.mul(of_own, scaling, out=scores[..., width : width + length])

        weights = scores.softmax(dim=-1).to(query.dtype)
        of_prompt = self._to_grid(weights[..., :width]).flatten(1, 2).view(-1, self._per_prompt * group, width)
        output = self._from_grid(torch.bmm(of_prompt, prompt_value.flatten(0, 1)), rows, group)
        output = output.reshape(heads * rows, group, size)
        output.baddbmm_(weights.view(heads * rows, group, columns)[..., width : width + length], own_value)
        return output.view(heads, rows, group * size).transpose(0, 1).reshape(rows, -1)

    def _to_grid(self, of_rows: torch.Tensor) -> torch.Tensor:
        """Scatter [H, B, G, X] to [H, P * rows per prompt, G, X], zero in empty slots."""
        if self._slot is None:
            return of_rows
        heads, _, group, last = of_rows.shape
        slots = self._prompt[0].shape[2] * self._per_prompt
        return of_rows.new_zeros(heads, slots, group, last).index_copy_(1, self._slot, of_rows)

    def _from_grid(self, of_prompts: torch.Tensor, rows: int, group: int) -> torch.Tensor:
        """Gather [H, B, G, X] from [H * P, rows per prompt * G, X]."""
        heads, last = self._prompt[0].shape[1], of_prompts.shape[-1]
        grid = of_prompts.view(heads, -1, group, last)
        return grid if self._slot is None else grid.index_select(1, self._slot)
