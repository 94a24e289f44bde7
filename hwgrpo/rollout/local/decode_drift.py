"""Startup comparison of decoding with full forward passes at the rounding of the model, over more tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hwgrpo.models.layer_values import smallest_value
from hwgrpo.models.lm_head import causal_lm
from hwgrpo.models.placeholders import ban, placeholder_ids
from hwgrpo.models.rounding import check_ids, find_excess, measure_rounding
from hwgrpo.models.windows import shorten_windows, windows_below
from hwgrpo.rollout.local.decode_rows import Rows

LENGTH = 40
"""Tokens at the most; a state that is updated wrongly differs more with every further one."""
PROMPT = 2 / 5
"""Share of them that is the prompt."""


def describe_drift(
    model: PreTrainedModel,
    make_rows: Callable[[], Rows],
    device: torch.device,
    longest: int | None,
) -> str | None:
    """Return a note if decoded logits differ from those of a full forward by more than rounding, None if not.

    Args:
        model: in evaluation mode, on `device`.
        make_rows: returns the rows that decode.
        device: where the model is.
        longest: longest sequence in tokens, prompt and response; shorter windows are shortened meanwhile. None:
            unknown.
    """
    base = causal_lm(model)
    embeddings: Any = base.get_input_embeddings()
    positions = smallest_value(base.config.get_text_config(), "max_position_embeddings") or LENGTH
    length = min(LENGTH, positions, longest or LENGTH)
    ids = check_ids(embeddings.weight.shape[0], length, placeholder_ids(base.config)).to(device)
    prompt, response = ids.tensor_split([max(1, int(PROMPT * length))])

    dtype = embeddings.weight.dtype

    def full() -> torch.Tensor:
        return _full(model, ids, len(response))

    def measure() -> torch.Tensor:
        effects = measure_rounding(embeddings, dtype, full, expected)
        # with experts, a rounding that routes one token elsewhere may do so to any
        return effects.amax().expand_as(effects)

    with shorten_windows(base, windows_below(base.config, longest)):
        decoded = ban(_decode(make_rows(), prompt.tolist(), response), placeholder_ids(base.config), 0.0)
        expected = full()
        if not (decoded.isfinite().all() and expected.isfinite().all()):
            return None
        excess = find_excess(decoded, expected, torch.finfo(dtype).eps, measure)
    if excess is None:
        return None
    return (
        f"rollout: within {len(response)} tokens decoded one by one, logits of {type(base).__name__} differ by "
        f"{excess} from those of a full forward: log-probs of rollout and training differ by as much; watch "
        "training/rollout_probs_diff_mean, and see algorithm.correction"
    )


def _decode(rows: Rows, prompt: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [1 + R, V] after the prompt and after each of R tokens."""
    numbers, first = rows.prefill([prompt])
    logits = [first.to(torch.float32, copy=True)]
    rows.arrange(~np.array(numbers), np.full(1, len(tokens)))
    logits += [rows.step(token[None]).to(torch.float32, copy=True) for token in tokens]
    return torch.cat(logits)


def _full(model: Any, ids: torch.Tensor, steps: int) -> torch.Tensor:
    logits = model(input_ids=ids[None], use_cache=False).logits[0, -1 - steps :].float()
    return ban(logits, placeholder_ids(causal_lm(model).config), 0.0)
