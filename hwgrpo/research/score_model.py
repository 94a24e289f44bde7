"""The reward model as the module that strategies wrap."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn


class ScoreModel(nn.Module):
    """A sequence-classification model whose forward ends in one score per sequence.

    It has the attributes and methods of `PolicyModel` that strategies use.

    Args:
        model: a transformers model for sequence classification with one label.
        compute_dtype: dtype of matrix products; parameters stay fp32 masters and autocast does the rest.
    """

    def __init__(self, model: Any, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype
        cached = "use_cache" in inspect.signature(model.forward).parameters
        self._options = {"use_cache": False} if cached else {}

    @property
    def base(self) -> Any:
        """The transformers model."""
        return self.model

    @property
    def pad(self) -> int:
        """Id of the padding token."""
        return int(self.model.config.get_text_config().pad_token_id)

    def set_passes(self, **options: Any) -> None:
        """Do nothing: the options are for a head over the vocabulary."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the scores of sequences, [B] fp32, or fp64 of a model in fp64.

        Args:
            input_ids: [B, T] tokens, padded on the right.
            attention_mask: [B, T] 1 at the sequences' own tokens.
        """
        casts = self.compute_dtype != torch.float32
        with torch.autocast(input_ids.device.type, self.compute_dtype) if casts else nullcontext():
            logits = self.model(input_ids=input_ids, attention_mask=attention_mask, **self._options).logits
        return logits[:, 0].float() if casts else logits[:, 0]

    hidden_states = forward
    """A strategy that shards registers this name."""
