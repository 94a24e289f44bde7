"""Log-probs of given tokens by the local engine's copy of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hwgrpo.models.lora import has_adapters


@torch.no_grad()
def score(model: Any, sequences: Sequence[Sequence[int]], *, adapter: bool = True) -> list[list[float]]:
    """Return the log-probs of each sequence's tokens after the first, at temperature 1.

    Args:
        model: a transformers causal LM in evaluation mode, or one wrapped by peft.
        sequences: token ids, all of one length.
        adapter: with the adapters, if there are any.
    """
    tokens = torch.tensor([list(tokens) for tokens in sequences], device=next(model.parameters()).device)
    with model.disable_adapter() if has_adapters(model) and not adapter else nullcontext():
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].tolist()
