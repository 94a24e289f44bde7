"""Startup check of the lean step against the model's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hwgrpo_backends.graphs import Recorder
from transformers import PreTrainedModel

from hwgrpo.errors import RunError
from hwgrpo.models.lm_head import causal_lm
from hwgrpo.models.placeholders import ban, placeholder_ids
from hwgrpo.models.rounding import check_ids, find_excess, measure_rounding
from hwgrpo.models.vision import image_encoder
from hwgrpo.rollout.local.architectures import unsupported_reason
from hwgrpo.rollout.local.decode_graph import RecordedRows
from hwgrpo.rollout.local.decode_rows import (
    CHECK_IDS,
    CHECK_LENGTH,
    CHECK_PROMPTS,
    CHECK_STEPS,
    FIRST_RESPONSE_TOKEN,
    ModelRows,
    Rows,
    check_prompts,
    tokens_of,
)
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.rollout.local.packed_weights import PackedWeights


def check_lean_step(
    model: PreTrainedModel,
    device: torch.device,
    recorder: Recorder | None = None,
    *,
    kernels: bool = False,
    packed: PackedWeights | None = None,
) -> str | None:
    """Decode a few tokens both ways; return why the lean step cannot be used, or None.

    Prompts have unequal lengths, and a row is dropped on the way. Where the model's encoder has a sample with an image
    (`ImageEncoder.sample`), a response to it is among them.

    Args:
        model: in evaluation mode, on `device`.
        device: where the model is.
        recorder: check the lean step as a recording of this recorder.
        kernels: check it with the kernels that the registry selects, not with torch's operations.
        packed: check it with products by these packed weights; None: by torch.

    Raises:
        RunError: recording fails.
    """
    reason = unsupported_reason(model, CHECK_LENGTH)
    if reason is not None:
        return reason
    embeddings: Any = model.get_input_embeddings()
    dtype = next(model.parameters()).dtype
    banned = placeholder_ids(causal_lm(model).config)
    ids = check_ids(embeddings.weight.shape[0], CHECK_IDS, banned)
    prompts: list[Sequence[int]] = [*check_prompts(ids, CHECK_PROMPTS)]
    if (encoder := image_encoder(model)) is not None and encoder.sample is not None:
        prompts.append(tokens_of(encoder.sample))

    def decode_by_model() -> torch.Tensor:
        return decode(ModelRows(model, device))

    def decode(rows: Rows) -> torch.Tensor:
        return ban(_decode_check_tokens(rows, prompts, ids.to(device)), banned, 0.0)

    try:
        expected = decode_by_model()
        rows: Rows = LeanRows(model, device, fixed=recorder is not None, kernels=kernels, packed=packed)
        if recorder is not None:
            rows = RecordedRows(rows, recorder, worth_recording=1)
        decoded = decode(rows)
    except RunError:
        raise
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        if kernels:  # of a compiler or driver: torch's operations do without
            return f"they fail ({type(error).__name__}: {line})"
        if isinstance(error, AttributeError | TypeError | RuntimeError):  # modules not built as in the tested versions
            return f"its layers are not as expected ({type(error).__name__}: {line})"
        raise
    floor = max(1e-3, 8 * torch.finfo(dtype).eps)
    excess = find_excess(
        decoded, expected, floor, lambda: measure_rounding(embeddings, dtype, decode_by_model, expected)
    )
    return f"its logits would differ by {excess}" if excess else None


def _decode_check_tokens(rows: Rows, prompts: Sequence[Sequence[int]], ids: torch.Tensor) -> torch.Tensor:
    first, second, *further = rows.prefill(prompts)[0]
    begun = np.array([first, first, second, *further])
    rows.arrange(~begun, np.full(len(begun), CHECK_STEPS))
    logits = []
    for step in range(CHECK_STEPS):
        last = step == CHECK_STEPS - 1
        if last:  # the first row has ended
            rows.arrange(np.arange(1, len(begun)), np.ones(len(begun) - 1, dtype=np.int64))
        place = FIRST_RESPONSE_TOKEN + step
        tokens = ids[place : place + len(begun) - last]
        logits.append(rows.step(tokens).to(torch.float32, copy=True))
    return torch.cat(logits)
