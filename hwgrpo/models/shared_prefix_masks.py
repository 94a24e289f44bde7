"""Attention in rows of several sequences: a prompt and the responses to it (branches), or sequences side by side.

A dense mask over such a row computes every score between two responses, and throws it away. Here the prompt attends to
itself, and each response, as a separate sequence, to the prompt's keys followed by its own. Both are computed by the
attention that the model has, which takes masks as transformers' `sdpa` does: that one, or a device's fused one. A layer
with a sliding window gets its own masks. Where a device has torch's flash kernels, they read lengths: then there is no
mask, and sequences side by side in one row are not copied. All this is registered with transformers under `NAME`, or
a name that begins with it; a forward without `branches` gets the model's own attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from hwgrpo_backends.device import send
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from hwgrpo.models import varlen_attention
from hwgrpo.models.layer_values import largest_value
from hwgrpo.models.varlen_attention import Part

NAME = "sdpa_branched"
"""Over `sdpa`; over another attention its name follows."""
LEAST_COLUMNS = 16
"""Fewest columns of a softmax: torch's on a CPU is several times slower if a row is shorter than a vector register."""
MOST_NARROW_KEYS = 32
"""Most keys that responses attend to by matrix products on a CPU (fp32), which is faster there than sdpa's kernel."""

BY_LENGTHS = f"{NAME}_by_lengths"
"""Over `sdpa`, with torch's flash kernels."""
MOST_CHANNELS = 256
"""Largest head size of torch's flash kernels."""

MOST_KEYS_IN_FP32 = 128
"""Most keys at which a CPU attends in fp32 where the model has 16 bits.

sdpa's kernel for 16 bits takes two to five times as long there at 60 keys, most of it in the backward pass, as long at
128, and three quarters as long at 500 (AMX, one thread).
"""


@dataclass(frozen=True)
class Packed:
    """The T tokens of B rows without their padding: all prompts, then all responses, row by row.

    A sequence that sees itself alone counts as a prompt.
    """

    total: int
    """T."""
    tokens: torch.Tensor | None
    """[T] int64: index of each among the B * L; None: the rows are one row without padding, in this order."""
    place: torch.Tensor | None
    """[B * L] int64: where each token stands among the T; any for padding. None as `tokens`."""
    offsets: torch.Tensor
    """[B + S + 1] int32: bounds of prompts and responses."""
    responses_of_rows: torch.Tensor
    """[B + 1] int32: bounds of the rows' responses among all response tokens; read where there are any."""
    prompts: int
    """Tokens of prompts."""
    longest_prompt: int
    longest: int
    """Longest prompt or response."""
    most_in_row: int
    """Most response tokens of a row."""

    def to(self, device: torch.device) -> Packed:
        """Return the same on `device`."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: send(tensor, device) for name, tensor in tensors.items()})

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return [T, heads, D] of [B, heads, L, D]; a view where the tokens are one row."""
        flat = tensor.transpose(1, 2).flatten(0, 1)
        return flat if self.tokens is None else flat.index_select(0, self.tokens)

    def unpack(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """Return [B, L, heads, D] of [T, heads, D], any values at padding; a view where the tokens are one row."""
        flat = tensor if self.place is None else tensor.index_select(0, self.place)
        return flat.unflatten(0, (rows, -1))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Each prompt and each response attends to itself, and the responses of a row to its prompt.

        No part is without queries, for which kernels cannot be launched, nor has a longest sequence of one query, for
        which they take the number of sequences for that of tokens: a larger bound is as right.
        """
        everything, longest = slice(0, self.total), max(2, self.longest)
        own = Part(everything, everything, self.offsets, self.offsets, longest, longest, causal=True)
        if self.prompts == self.total:
            return (own,)
        responses, prompts = slice(self.prompts, self.total), slice(0, self.prompts)
        of_prompts = self.offsets[: len(self.responses_of_rows)]
        most = max(2, self.most_in_row), self.longest_prompt
        return own, Part(responses, prompts, self.responses_of_rows, of_prompts, *most, causal=False)


@dataclass(frozen=True)
class Sequences:
    """Sequences side by side in B rows of L tokens, each of which sees itself alone."""

    packed: Packed
    """Each counts as a prompt."""
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict, compare=False)

    def to(self, device: torch.device) -> Sequences:
        """Return the same on `device`."""
        return Sequences(self.packed.to(device))

    def parts(self, window: int | None) -> tuple[Part, ...]:
        """Return what a layer with this sliding window attends to; None: without a window."""
        within = window if window is not None and window < self.packed.longest else None
        return tuple(replace(part, window=within) for part in self.packed.parts)

    def mask(self, window: int | None, dtype: torch.dtype, rows: int, width: int) -> torch.Tensor:
        """Return the mask added to the scores, [B, 1, L, L], for a layer that the flash kernels do not serve.

        Made once for all layers.

        Args:
            window: a token sees itself and the window - 1 tokens before it; None: everything before it.
            dtype: of the mask.
            rows: B.
            width: L.
        """
        key = (window, dtype)
        if key not in self._masks:
            packed, device = self.packed, self.packed.offsets.device
            token = torch.arange(packed.total, device=device)
            tokens = token if packed.tokens is None else packed.tokens
            sequence = torch.full((rows * width,), -1, device=device)  # of padding
            sequence[tokens] = torch.searchsorted(packed.offsets[1:], token.int(), right=True)
            sequence, column = sequence.view(rows, 1, width), torch.arange(width, device=device)
            behind = column[:, None] - column
            near = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            self._masks[key] = additive((sequence.mT == sequence) & near, dtype)[:, None]
        return self._masks[key]


@dataclass(frozen=True)
class Branches:
    """Positions of prompts and responses in B rows of L tokens; at most K responses per row, of at most R tokens."""

    prompt_width: int
    """P, tokens of the longest prompt."""
    responses: torch.Tensor
    """[B, K, R] int64: index of each response's tokens among the B * L; any token for absent ones."""
    prompt_lengths: torch.Tensor
    """[B] int64."""
    place: torch.Tensor
    """[B * L] int64: where each token stands among B * P tokens of prompts and then B * K * R of responses."""
    packed: Packed
    """The same without padding, for kernels that read lengths."""
    _masks: dict[Any, tuple[torch.Tensor | None, torch.Tensor]] = field(default_factory=dict, compare=False)

    def to(self, device: torch.device) -> Branches:
        """Return the same on `device`."""
        return replace(
            self,
            responses=send(self.responses, device),
            prompt_lengths=send(self.prompt_lengths, device),
            place=send(self.place, device),
            packed=self.packed.to(device),
            _masks={},
        )

    def masks(self, window: int | None, dtype: torch.dtype, group: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the masks added to the scores of prompts and of responses; made once for all layers.

        Args:
            window: a token sees itself and the window - 1 tokens before it; None: everything before it.
            dtype: of the masks.
            group: G, query heads per key-value head.

        Returns:
            [P, P] over a prompt, None where plain causal attention is right; [B * K, 1, G * R, P + R] over the prompt's
            keys and then the response's own.
        """
        key = (window, dtype, group)
        if key not in self._masks:
            of_prompt, of_responses = self._make_masks(window, dtype)
            self._masks[key] = of_prompt, of_responses.repeat(1, 1, group, 1)
        return self._masks[key]

    def _make_masks(self, window: int | None, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor]:
        B, K, R = self.responses.shape
        P = self.prompt_width
        column = torch.arange(P, device=self.place.device)
        own = torch.arange(R, device=self.place.device)
        position = self.prompt_lengths[:, None] + own
        distance = position[:, :, None] - torch.cat([column.expand(B, P), position], dim=1)[:, None]
        in_prompt = (column < self.prompt_lengths[:, None])[:, None].expand(B, R, P)
        visible = torch.cat([in_prompt, (own[:, None] >= own).expand(B, R, R)], dim=-1)
        of_prompt = None
        if window is not None:
            visible = visible & (distance < window)
            behind = column[:, None] - column
            of_prompt = additive((behind >= 0) & (behind < window), dtype) if window < P else None
        return of_prompt, additive(visible, dtype).repeat_interleave(K, dim=0)[:, None]


def enable(model: PreTrainedModel) -> None:
    """Make a model's attention the one of this module over the one it has, if it is not yet.

    Raises:
        ValueError: the architecture does not support replacing its attention.
    """
    own = model.config._attn_implementation or "eager"
    if NAME not in own:  # the exchange of heads and tokens may stand around it
        replace_attention(model, _over(own))


def use_lengths(model: PreTrainedModel) -> None:
    """Compute rows with torch's flash kernels over packed tokens, where the model's own attention is `sdpa`."""
    replace_attention(model, BY_LENGTHS)


def replace_attention(model: PreTrainedModel, name: str) -> None:
    """Make a model's attention the one that is registered with transformers under `name`.

    Raises:
        ValueError: the architecture does not support replacing its attention.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the error below replaces its warning
    try:
        model.set_attn_implementation(name)
    finally:
        logging.set_verbosity(verbosity)
    if model.config._attn_implementation != name:
        raise ValueError(f"{type(model).__name__} does not support replacing its attention")


def _over(own: str) -> str:
    """Return the name of branched attention over a model's own, registered with transformers."""
    if own == "sdpa" or own not in AttentionInterface().valid_keys():  # "eager" is a function of each architecture
        return NAME
    name = f"{NAME}_{own}"
    AttentionInterface.register(name, partial(branched_attention, attend=AttentionInterface()[own]))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def branched_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    branches: Branches | Sequences | None = None,
    attend: Callable[..., tuple[torch.Tensor, None]] = sdpa_attention_forward,
    by_lengths: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within the `branches`; the signature is that of transformers' attention functions.

    Args:
        module: the attention layer.
        query: [B, heads, L, D].
        key: [B, key-value heads, L, D].
        value: [B, key-value heads, L, D'].
        attention_mask: read where there are no branches.
        branches: None: `attend` alone.
        attend: computes with the arguments, masks and results of transformers' `sdpa`.
        by_lengths: with torch's flash kernels over packed tokens, where they serve the layer (`use_lengths`).
        options: of `attend` (dropout, scaling, sliding_window, ...).

    Returns:
        [B, L, heads, D'], and no weights.

    Raises:
        ValueError: the layer has a sliding window and does not pass it.
    """
    shares = isinstance(branches, Branches)
    keys = branches.prompt_width + branches.responses.shape[2] if shares else key.shape[2]
    if attend is sdpa_attention_forward and not by_lengths and _is_faster_in_fp32(query, keys):
        mask = attention_mask
        if mask is not None and mask.is_floating_point():
            mask = mask.float()
        with torch.autocast("cpu", enabled=False):
            output, _ = branched_attention(
                module, query.float(), key.float(), value.float(), mask, branches=branches, **options
            )
        return output.to(query.dtype), None
    if branches is None:
        return attend(module, query, key, value, attention_mask, **options)
    if torch.is_autocast_enabled(query.device.type):  # each product would cast them, the masks once per layer
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    window = window_of(module, options.get("sliding_window"))
    if by_lengths and (parts := _parts(query, value, branches, window, options)):
        packed = branches.packed
        query_T, key_T, value_T = packed.pack(query), packed.pack(key), packed.pack(value)
        output = varlen_attention.attend(query_T, key_T, value_T, parts, options.get("scaling"))
        return packed.unpack(output, len(query)), None
    if isinstance(branches, Sequences):
        options["is_causal"] = False
        mask = branches.mask(window, query.dtype, len(query), query.shape[2])
        return attend(module, query, key, value, mask, **options)
    # For sdpa, query heads that share a key-value head become further queries of it, so that no key and no value is
    # repeated for them. A fused attention shares them by itself; its mask stays that much smaller.
    group = query.shape[1] // key.shape[1] if attend is sdpa_attention_forward else 1
    prompt_mask, response_mask = branches.masks(window, query.dtype, group)
    options["is_causal"] = prompt_mask is None
    prompt = slice(branches.prompt_width)
    of_prompts, _ = attend(module, query[:, :, prompt], key[:, :, prompt], value[:, :, prompt], prompt_mask, **options)
    options["is_causal"] = False
    own = _own(query, branches).unflatten(2, (-1, group)).flatten(3, 4).flatten(0, 1)
    keys, values = (_after_prompt(tensor[:, :, prompt], _own(tensor, branches)) for tensor in (key, value))
    if attend is sdpa_attention_forward and _is_narrow(keys, options):
        of_responses = _narrow_attention(own, keys, values, response_mask, options.get("scaling"))
    else:
        of_responses, _ = attend(_UNGROUPED if group > 1 else module, own, keys, values, response_mask, **options)
    of_responses = of_responses.unflatten(1, (group, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    outputs = torch.cat([of_prompts.flatten(0, 1), of_responses.flatten(0, 1)])
    return outputs.index_select(0, branches.place).unflatten(0, (len(query), -1)), None


def reason_against_heads(size: int) -> str | None:
    """Return why torch's flash kernels do not serve heads of `size` channels; None if they do."""
    if size % 8 == 0 and size <= MOST_CHANNELS:
        return None
    return f"heads have {size} channels, and flash kernels take multiples of 8 up to {MOST_CHANNELS}"


def _parts(
    query: torch.Tensor,
    value: torch.Tensor,
    branches: Branches | Sequences,
    window: int | None,
    options: dict[str, Any],
) -> tuple[Part, ...]:
    """Return what a layer attends to by torch's flash kernels; none if they do not serve it.

    A window cannot span a prompt and the responses that share it: the kernel would need a copy of the prompt for each.
    """
    if not _is_served(query, value, options):
        return ()
    if isinstance(branches, Sequences):
        return branches.parts(window)
    packed = branches.packed
    in_reach = window is not None and window < packed.longest_prompt + packed.longest
    return () if in_reach else packed.parts


def _is_served(query: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> bool:
    """Return whether torch's flash kernels compute such heads: in 16 bits, and here without dropout."""
    plain = query.dtype.itemsize == 2 and not options.get("dropout") and value.shape[-1] == query.shape[-1]
    return plain and reason_against_heads(query.shape[-1]) is None


def _is_faster_in_fp32(query: torch.Tensor, keys: int) -> bool:
    """Return whether attention to so many keys is faster in fp32 than in the dtype of its 16 bits."""
    return query.device.type == "cpu" and query.dtype.itemsize == 2 and keys <= MOST_KEYS_IN_FP32


def _is_narrow(keys: torch.Tensor, options: dict[str, Any]) -> bool:
    """Return whether matrix products are faster than sdpa's kernel."""
    few = keys.shape[2] <= MOST_NARROW_KEYS and not options.get("dropout")
    return few and keys.device.type == "cpu" and keys.dtype == torch.float32


def _narrow_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attend by matrix products and a softmax.

    Args:
        query: [B, heads, Q, D].
        key: [B, heads, K, D].
        value: [B, heads, K, D'].
        mask: [B, 1, Q, K], added to the scores.
        scaling: factor of the scores; None: D to the power of -1/2.

    Returns:
        [B, Q, heads, D'].
    """
    heads, columns = query.shape[:2], key.shape[2]
    scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)).unflatten(0, heads)
    scores = torch.add(mask, scores, alpha=query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.nn.functional.pad(scores, (0, max(0, LEAST_COLUMNS - columns)), value=-torch.inf)
    weights = scores.softmax(dim=-1)[..., :columns]
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).unflatten(0, heads).transpose(1, 2)


_UNGROUPED: Any = SimpleNamespace(num_key_value_groups=1)
"""Stand-in for a layer in which every query head has its own key head, for transformers' attention."""


def window_of(module: torch.nn.Module, window: int | None) -> int | None:
    """Return the sliding window of a layer; whether it has one is in its configuration.

    Args:
        module: the attention layer.
        window: the `sliding_window` argument of its attention function; None if it was not passed.

    Raises:
        ValueError: the layer has one and does not pass it.
    """
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        layer: Any = module.layer_idx
        sliding = kinds[layer] == "sliding_attention"
    else:
        sliding = bool(largest_value(config, "sliding_window")) and getattr(config, "use_sliding_window", True)
    if sliding and window is None:
        raise ValueError("a layer does not pass the sliding window to its attention")
    return window if sliding else None


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where True, else the lowest finite number."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


def _own(tensor: torch.Tensor, branches: Branches) -> torch.Tensor:
    """Take the responses' part of [B, heads, L, D] as [B, K, heads, R, D]."""
    flat = tensor.transpose(1, 2).flatten(0, 1)
    own = flat.index_select(0, branches.responses.flatten())
    return own.unflatten(0, branches.responses.shape).transpose(2, 3)


def _after_prompt(of_prompt: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Put [B, heads, P, D] before each of [B, K, heads, R, D]: [B * K, heads, P + R, D]."""
    repeated = of_prompt[:, None].expand(-1, own.shape[1], -1, -1, -1)
    return torch.cat([repeated, own], dim=3).flatten(0, 1)


AttentionInterface.register(NAME, branched_attention)
AttentionInterface.register(BY_LENGTHS, partial(branched_attention, by_lengths=True))
AttentionMaskInterface.register(BY_LENGTHS, sdpa_mask)
AttentionMaskInterface.register(NAME, sdpa_mask)
