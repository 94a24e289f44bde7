"""Startup comparison of decoding after a prompt with an image with the logits that the model computes itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hwgrpo.errors import ConfigError
from hwgrpo.models.lm_head import causal_lm
from hwgrpo.models.placeholders import ban, placeholder_ids
from hwgrpo.models.rounding import check_ids, find_excess, measure_rounding
from hwgrpo.models.vision import own_logits
from hwgrpo.rollout.local.decode_rows import ModelRows, tokens_of
from hwgrpo.values import Prompt

STEPS = 3


@torch.no_grad()
def check_images(model: PreTrainedModel, device: torch.device, sample: Prompt, *, supports_padding: bool) -> None:
    """Compare what is sampled after an image to what the model itself computes of its pixels, on a few tokens.

    A prompt of text is in the same batch, where prompts of unequal length may be.

    Args:
        model: in evaluation mode, on `device`.
        device: where the model is.
        sample: a prompt with an image.
        supports_padding: whether they may.

    Raises:
        ConfigError: logits differ by more than rounding.
    """
    base, images = causal_lm(model), sample.images
    assert images is not None
    embeddings: Any = base.get_input_embeddings()
    dtype, without = embeddings.weight.dtype, placeholder_ids(base.config)
    ids = check_ids(embeddings.weight.shape[0], 3 + 2 * STEPS, without)
    text, tokens = ids[:3], ids[3:].view(2, STEPS)
    prompts = [tokens_of(sample), *([tuple(text.tolist())] if supports_padding else [])]
    tokens = tokens[: len(prompts)]

    def full() -> torch.Tensor:
        logits = [own_logits(model, [*sample.token_ids, *tokens[0].tolist()], images)[-1 - STEPS :]]
        if supports_padding:
            of_text = torch.cat([text, tokens[1]])[None].to(device)
            logits.append(base(input_ids=of_text, use_cache=False).logits[0, -1 - STEPS :])
        return ban(torch.stack(logits, dim=1).flatten(0, 1).float(), without, 0.0)

    rows = ModelRows(model, device)
    numbers, logits = rows.prefill(prompts)
    decoded = [logits]
    rows.arrange(~np.array(numbers), np.full(len(prompts), STEPS))
    decoded += [rows.step(step) for step in tokens.T.to(device)]
    expected = full()
    if not expected.isfinite().all():
        return
    floor = max(1e-3, 32 * torch.finfo(dtype).eps)
    excess = find_excess(
        ban(torch.cat(decoded), without, 0.0),
        expected,
        floor,
        lambda: measure_rounding(embeddings, dtype, full, expected),
    )
    if excess is not None:
        raise ConfigError(
            f"rollout.engine='local' cannot sample from {type(base).__name__}: after a prompt with an image, logits "
            f"differ by {excess} from those that the model computes of the pixels itself"
        )
