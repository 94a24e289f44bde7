"""Startup comparison of decoding with full forward passes at the rounding of the model, over more tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hwgrpo.models.layer_values import smallest_value
from hwgrpo.models.lm_head import causal_lm
from hwgrpo.models.windows import shorten_windows, windows_below
from hwgrpo.rollout.local.decode_rows import Rows

LENGTH = 40
"""Tokens at the most; a state that is updated wrongly differs more with every further one."""
PROMPT = 2 / 5
"""Share of them that is the prompt."""

MARGIN = 16
"""Largest gap, in effects of one rounding of the embeddings.

A full forward with each embedding changed by a unit in its last place has other roundings everywhere, so that its
logits differ by as much as rounding makes of this model, whatever its depth and width, recurrences and routers.
Decoding has other roundings, too, of as many sums: its gap is another draw of the same size. 16 is for the maxima of
unlike draws.
"""

TF32 = 2.0**-10
"""Unit in the last place of TF32, in which accelerators may multiply fp32."""


def describe_drift(
    model: PreTrainedModel,
    make_rows: Callable[[Sequence[Sequence[int]], int], Rows],
    device: torch.device,
    longest: int | None,
) -> str | None:
    """Return a note if decoded logits differ from those of a full forward by more than rounding, None if not.

    Args:
        model: in evaluation mode, on `device`.
        make_rows: returns the rows that decode, for prompts and a number of response tokens.
        device: where the model is.
        longest: longest sequence in tokens, prompt and response; shorter windows are shortened meanwhile. None:
            unknown.
    """
    base = causal_lm(model)
    embeddings: Any = base.get_input_embeddings()
    positions = smallest_value(base.config.get_text_config(), "max_position_embeddings") or LENGTH
    length = min(LENGTH, positions, longest or LENGTH)
    ids = (7 * torch.arange(length, device=device) + 3) % embeddings.weight.shape[0]
    prompt, response = ids.tensor_split([max(1, int(PROMPT * length))])
    with shorten_windows(base, windows_below(base.config, longest)):
        decoded = _decode(make_rows([prompt.tolist()], len(response)), response)
        expected = _full(model, ids, len(response))
        with _embeddings_rounded_once(embeddings, device):
            rounded = _full(model, ids, len(response))
    magnitude = float(expected.abs().max())
    gap, rounding = (float((logits - expected).abs().max()) / magnitude for logits in (decoded, rounded))
    if not gap > MARGIN * rounding:  # nor where logits are not finite
        return None
    return (
        f"rollout: within {len(response)} tokens decoded one by one, logits of {type(base).__name__} differ by "
        f"{gap:.1g} of the largest from those of a full forward ({rounding:.1g} is rounding): log-probs of rollout and "
        "training differ by as much; watch training/rollout_probs_diff_mean, and see algorithm.correction"
    )


def _decode(rows: Rows, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [1 + R, V] after the prompt and after each of R tokens."""
    logits = [rows.prefill().to(torch.float32, copy=True)]
    rows.spread(np.zeros(1, dtype=np.int64))
    logits += [rows.step(token[None]).to(torch.float32, copy=True) for token in tokens]
    return torch.cat(logits)


def _full(model: Any, ids: torch.Tensor, steps: int) -> torch.Tensor:
    return model(input_ids=ids[None], use_cache=False).logits[0, -1 - steps :].float()


@contextmanager
def _embeddings_rounded_once(embeddings: torch.nn.Module, device: torch.device) -> Any:
    """Change each value of the embeddings by a unit in its last place, up or down, within the block."""

    def change(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        eps = torch.finfo(output.dtype).eps
        if output.dtype == torch.float32 and device.type != "cpu":
            eps = TF32
        signs = torch.randint(0, 2, output.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        return output * (1 + eps * signs.to(output))

    hook = embeddings.register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()
