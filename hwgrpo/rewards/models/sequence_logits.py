"""The logits of sequence-classification models for rows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hwgrpo.rewards.models.padded_batches import padded, unused_id


def padding_id(model: Any) -> int | None:
    """Return the id of the padding token in a model's configuration, None if it names none."""
    return model.config.get_text_config().pad_token_id


def sequence_logits(model: Any, rows: Sequence[Sequence[int]], pad: int | None, device: torch.device) -> torch.Tensor:
    """Return the logits of a batch on the device, [B, labels] fp32.

    Args:
        model: a sequence-classification model.
        rows: B rows of tokens.
        pad: `padding_id` of the model as it was loaded.
        device: the model's.
    """
    if pad is None:
        # Decoders read the last token that is not padding: with an id that no row has, it is the row's last token,
        # as it is for a row by itself.
        config = model.config.get_text_config()
        config.pad_token_id = chosen = unused_id(rows, config.vocab_size)
        if chosen is None and len(rows) > 1:  # a very small vocabulary
            return torch.cat([sequence_logits(model, [row], None, device) for row in rows])
    else:
        chosen = pad
    ids, mask = padded(rows, chosen or 0)
    return model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float()
