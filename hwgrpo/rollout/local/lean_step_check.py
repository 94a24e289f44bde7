"""Whether the lean step may decode a model: it is tried against the model's own forward before anything is sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hwgrpo_backends.graphs import Recorder
from transformers import PreTrainedModel

from hwgrpo.errors import RunError
from hwgrpo.rollout.local.architectures import obstacle
from hwgrpo.rollout.local.decode_graph import RecordedRows
from hwgrpo.rollout.local.decode_rows import TRIAL_LENGTH, TRIAL_PROMPTS, TRIAL_STEPS, ModelRows, Rows
from hwgrpo.rollout.local.lean_step import LeanRows


def proven(model: PreTrainedModel, device: torch.device, recorder: Recorder | None = None) -> str | None:
    """Decode a few tokens both ways, with unequal prompts and a row dropped; say why the lean step cannot be used.

    Args:
        model: in evaluation mode, on `device`.
        device: where the model is.
        recorder: try the lean step as a recording that this makes.

    Raises:
        RunError: recording fails.
    """
    reason = obstacle(model, TRIAL_LENGTH)
    if reason is not None:
        return reason
    embeddings: Any = model.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    prompts = [[token % vocabulary for token in prompt] for prompt in TRIAL_PROMPTS]
    try:
        expected = _trial(ModelRows(model, prompts, device), device, vocabulary)
        rows: Rows = LeanRows(model, prompts, device, TRIAL_STEPS, fixed=recorder is not None)
        if recorder is not None:
            rows = RecordedRows(rows, recorder, TRIAL_STEPS, worth_recording=1)
        found = _trial(rows, device, vocabulary)
    except RunError:
        raise
    except (AttributeError, TypeError, RuntimeError) as error:  # modules that are not built as in the tested versions
        line = (str(error).splitlines() or [""])[0]
        return f"its layers are not as expected ({type(error).__name__}: {line})"
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
        logits.append(rows.step(tokens % vocabulary).to(torch.float32, copy=True))
    return torch.cat(logits)
