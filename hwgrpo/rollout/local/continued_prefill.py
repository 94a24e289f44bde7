"""Prefill of what sequences have beyond the keys and values that are held of their beginnings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from hwgrpo.models.vision import image_encoder
from hwgrpo.rollout.local.decode_rows import ModelRows, images_after
from hwgrpo.rollout.local.shared_prefix_attention import ParkedRow


def prefill_after(
    model: Any, device: torch.device, rows: Sequence[ParkedRow], sequences: Sequence[Sequence[int]]
) -> tuple[list[ParkedRow], torch.Tensor]:
    """Compute the tokens of G sequences after their parked beginnings by the model's own forward.

    Args:
        model: in evaluation mode, on `device`.
        device: where the model is.
        rows: what is held of each sequence: prompt and response so far.
        sequences: all token ids of each, at least one more than are held; images that are held stand before those that
            are not.

    Returns:
        The rows with all tokens of their sequences, and the logits [G, V] after the last ones.
    """
    new = [len(sequence) - row.length for sequence, row in zip(sequences, rows, strict=True)]
    assert min(new) >= 1
    longer: dict[int, ParkedRow] = {}
    logits: dict[int, torch.Tensor] = {}
    order = sorted(range(len(rows)), key=lambda i: new[i])
    placeholder = None if (encoder := image_encoder(model)) is None else encoder.token_id
    while order:
        # Each is computed as many tokens as the most of them have: at most twice as many as its own, and none of a held
        # image, whose features are not encoded again.
        together, most = [], 2 * new[order[0]]
        for i in order:
            if new[i] <= most:
                together.append(i)
                most = min(most, _text_after_images(sequences[i], rows[i].length, placeholder))
        order = order[len(together) :]
        grown, last = _prefill_together(model, device, [rows[i] for i in together], [sequences[i] for i in together])
        longer |= zip(together, grown, strict=True)
        logits |= zip(together, last, strict=True)
    return [longer[i] for i in range(len(rows))], torch.stack([logits[i] for i in range(len(rows))])


def _prefill_together(
    model: Any, device: torch.device, rows: Sequence[ParkedRow], sequences: Sequence[Sequence[int]]
) -> tuple[list[ParkedRow], torch.Tensor]:
    """Do as `prefill_after` in one forward, of the last M tokens of each sequence, M the most that is new.

    So all padding is on the left, in front of the first token: a gap would count as distance in attention windows. The
    last held tokens of the others are computed again, and what was held of them stays.
    """
    most = max(len(sequence) - row.length for sequence, row in zip(sequences, rows, strict=True))
    firsts = [max(0, len(sequence) - most) for sequence in sequences]
    cache = DynamicCache(config=model.config)
    for layer in range(len(rows[0].layers)):
        held = [torch.cat([row.prompt.layers[layer], row.layers[layer]], dim=2) for row in rows]
        padded = [
            pad(each[:, :, :first], (0, 0, max(firsts) - first, 0)) for each, first in zip(held, firsts, strict=True)
        ]
        keys, values = torch.stack(padded, dim=1)
        cache.update(keys, values, layer)
    forward = ModelRows(model, device)
    images = [
        each for row, sequence in zip(rows, sequences, strict=True) for each in images_after(sequence, len(row.images))
    ]
    logits = forward.prefill_after(cache, firsts, sequences, images)
    longer = []
    for i, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
        new = len(sequence) - row.length
        layers: list[Any] = list(cache.layers)
        pairs = [torch.stack([layer.keys[i, :, -new:], layer.values[i, :, -new:]]) for layer in layers]
        longer.append(
            ParkedRow(row.prompt, [torch.cat([old, pair], dim=2) for old, pair in zip(row.layers, pairs, strict=True)])
        )
    return longer, logits


def _text_after_images(sequence: Sequence[int], held: int, placeholder: int | None) -> int:
    """Return the most last tokens of a sequence among which is none of an image in its `held` first ones."""
    if placeholder is None or placeholder not in sequence[:held]:
        return sys.maxsize
    return len(sequence) - held + sequence[:held][::-1].index(placeholder)
