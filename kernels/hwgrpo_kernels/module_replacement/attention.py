"""`npu_fusion_attention` (FlashAttentionScore) as an attention implementation of transformers, under `IMPLEMENTATION`.

Three kinds of calls, distinguished by the mask that transformers made (that of its `sdpa`):

| mask | meaning | call |
|---|---|---|
| none, several queries | causal, no padding | sparse_mode 3, with the [2048, 2048] triangle that it requires |
| none, one query | sees all keys | no mask, sparse_mode 0 |
| dense, True or 0 = visible | padding, sliding windows, several sequences in a row | sparse_mode 1, inverted |

In `atten_mask` True means masked OUT, the opposite of torch. A sliding window that is shorter than the row is always in
the dense mask, so that no layer has to pass it. Key-value heads are not repeated: the op groups query heads itself. Its
scale defaults to 1, so it is always passed. There is no dropout.

A query without visible keys (padding on the left, in sampling) sees all of them instead: nothing reads its output, and
the op's result for a row without keys, which later layers would multiply by 0, is undocumented.

Layouts: `padded` rows have no mask and run causal, the op's best case. `packed` and `grouped_masked` rows have a dense
mask. A `grouped` row makes two calls: prompts, causal, and responses, over their prompt's keys and their own, with a
mask. The op's form for variable lengths (TND) is unused: by lengths rows are computed by torch's own operators alone,
which an NPU lacks (`hwgrpo.models.varlen_attention`).

Source: torch-npu's document of torch_npu.npu_fusion_attention, CANN's aclnnFlashAttentionScore. Never run on hardware.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

NAME, OP = "attention", "npu_fusion_attention"
IMPLEMENTATION = "npu_fusion_attention"
TRIANGLE = 2048
"""Size of the mask for sparse modes 2 to 4, whatever the sequence length."""

CHANGES_SCORES = ("softcap", "s_aux", "position_bias", "cache")
"""Options of transformers' attention functions that this one does not support."""

_recorded_calls: ContextVar[list[tuple[Any, ...]] | None] = ContextVar("recorded_calls", default=None)


def fusion_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend; the signature is that of transformers' attention functions.

    Args:
        module: the attention layer.
        query: [B, heads, Lq, D].
        key, value: [B, key-value heads, Lk, D].
        attention_mask: [B or 1, 1, Lq, Lk], True where visible, or 0 where visible and very negative elsewhere.
        dropout: must be 0.
        scaling: factor of the scores; 1 / sqrt(D) when left out.
        is_causal: the layer's own when left out.
        options: those that the op does not support must be None.

    Returns:
        [B, Lq, heads, D], and no weights.

    Raises:
        ValueError: dropout, or an option that changes the scores.
    """
    recorded = _recorded_calls.get()
    if recorded is not None:
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **options}
        recorded.append((module, query, key, value, attention_mask, options))
        return plain_attention(module, query, key, value, attention_mask, **options)
    unsupported = [name for name in CHANGES_SCORES if options.get(name) is not None]
    if unsupported or dropout:
        raise ValueError(
            f"{IMPLEMENTATION} does not support {', '.join(unsupported) or 'dropout'}, which {type(module).__name__} "
            "passes; use sdpa or eager attention"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if torch.is_autocast_enabled(query.device.type):  # torch casts for its own attention, not for this op
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    queries = query.shape[2]
    if attention_mask is not None:
        hidden = ~attention_mask if attention_mask.dtype == torch.bool else attention_mask < _lowest(attention_mask) / 2
        hidden = hidden & ~hidden.all(dim=-1, keepdim=True)
        mode = {"atten_mask": hidden.expand(query.shape[0], 1, queries, key.shape[2]), "sparse_mode": 1}
    elif is_causal and queries > 1:
        key, value = key[:, :, :queries], value[:, :, :queries]  # later entries of a static cache are empty
        mode = {"atten_mask": _triangle(query.device), "sparse_mode": 3}
    else:
        mode = {"sparse_mode": 0}
    output = torch.ops.npu.npu_fusion_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        query.shape[1],
        "BSND",
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        keep_prob=1.0,
        **mode,
    )[0]
    return output, None


def plain_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend by transformers' `sdpa`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def reason_against(model: Any) -> str | None:
    """Return why a model's attention cannot be replaced, or None."""
    for base in models_in(model):
        if not base._can_set_attn_implementation():
            return f"{type(base).__name__} does not support replacing its attention"
        if base.config._attn_implementation == IMPLEMENTATION:
            return "it is fused already"
        if not base._supports_sdpa:
            return f"{type(base).__name__} has attention that sdpa cannot compute, and this op computes what sdpa does"
        if getattr(base.config.get_text_config(), "attn_logit_softcapping", None):
            return "the model soft-caps attention scores (attn_logit_softcapping)"
        rates = [value for name, value in vars(base.config).items() if name in ("attention_dropout", "attn_pdrop")]
        if any(rates):
            return "the model has attention dropout"
    return None


def models_in(model: nn.Module) -> list[Any]:
    """Return the transformers models inside a module, a wrapped causal LM and its backbone among them."""
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def replace_attention(model: nn.Module) -> Callable[[], None]:
    """Set this attention in a model's config; return a function that restores the previous one."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, fusion_attention)  # adds our name; replaces none
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    inside = models_in(model)
    configs = {id(config): config for base in inside for config in (base.config, base.config.get_text_config())}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    inside[0].set_attn_implementation(IMPLEMENTATION)

    def undo() -> None:
        for config, name in before:
            config._attn_implementation_internal = name

    return undo


@contextmanager
def recording() -> Iterator[list[tuple[Any, ...]]]:
    """Record attention calls in the block, and compute them by plain attention."""
    recorded: list[tuple[Any, ...]] = []
    token = _recorded_calls.set(recorded)
    try:
        yield recorded
    finally:
        _recorded_calls.reset(token)


def self_test_calls(call: tuple[Any, ...]) -> Iterator[tuple[tuple[Tensor, ...], Tensor | None, dict[str, Any]]]:
    """Yield ((query, key, value), mask, options) of a recorded call: unchanged, with padding, with one query."""
    _, query, key, value, mask, options = call
    yield (query, key, value), mask, options
    length = query.shape[2]
    visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().expand(2, 1, length, length)
    visible = visible.clone()
    visible[1, :, :, length // 2 :] = False  # its second half is padding
    yield (query[:2], key[:2], value[:2]), visible, options
    yield (query[:, :, -1:], key, value), None, options


def _lowest(mask: Tensor) -> float:
    return torch.finfo(mask.dtype).min


@cache
def _triangle(device: torch.device) -> Tensor:
    """Return [2048, 2048], True above the diagonal; an ordinary tensor even if first called in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool, device=device).triu(1)
