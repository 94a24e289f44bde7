"""Startup check of the lean step against the model's own forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hwgrpo_backends.graphs import Recorder
from transformers import PreTrainedModel

from hwgrpo.errors import RunError
from hwgrpo.rollout.local.architectures import unsupported_reason
from hwgrpo.rollout.local.decode_graph import RecordedRows
from hwgrpo.rollout.local.decode_rows import CHECK_LENGTH, CHECK_PROMPTS, CHECK_STEPS, ModelRows, Rows
from hwgrpo.rollout.local.lean_step import LeanRows


def check_lean_step(model: PreTrainedModel, device: torch.device, recorder: Recorder | None = None) -> str | None:
    """Decode a few tokens both ways; return why the lean step cannot be used, or None.

    Prompts have unequal lengths, and a row is dropped on the way.

    Args:
        model: in evaluation mode, on `device`.
        device: where the model is.
        recorder: check the lean step as a recording of this recorder.

    Raises:
        RunError: recording fails.
    """
    reason = unsupported_reason(model, CHECK_LENGTH)
    if reason is not None:
        return reason
    embeddings: Any = model.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    prompts = [[token % vocabulary for token in prompt] for prompt in CHECK_PROMPTS]
    try:
        expected = _decode_check_tokens(ModelRows(model, prompts, device), device, vocabulary)
        rows: Rows = LeanRows(model, prompts, device, CHECK_STEPS, fixed=recorder is not None)
        if recorder is not None:
            rows = RecordedRows(rows, recorder, CHECK_STEPS, worth_recording=1)
        decoded = _decode_check_tokens(rows, device, vocabulary)
    except RunError:
        raise
    except (AttributeError, TypeError, RuntimeError) as error:  # modules that are not built as in the tested versions
        line = (str(error).splitlines() or [""])[0]
        return f"its layers are not as expected ({type(error).__name__}: {line})"
    gap = float((decoded - expected).abs().max() / expected.abs().max())
    # Effect of rounding: in fp32 products may be computed in TF32, in bf16 every operation rounds to 3 digits.
    tolerance = max(1e-3, 8 * torch.finfo(next(model.parameters()).dtype).eps)
    return None if gap <= tolerance else f"its logits would differ by {gap:.2g}"


def _decode_check_tokens(rows: Rows, device: torch.device, vocabulary: int) -> torch.Tensor:
    rows.prefill()
    rows.spread(np.array([0, 0, 1]))
    logits = []
    for step in range(CHECK_STEPS):
        if step == CHECK_STEPS - 1:
            rows.select(np.array([1, 2]))
        tokens = torch.arange(2 if step == CHECK_STEPS - 1 else 3, device=device) + 9 + step
        logits.append(rows.step(tokens % vocabulary).to(torch.float32, copy=True))
    return torch.cat(logits)
