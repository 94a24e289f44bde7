"""Attention of ranks that hold parts of the same token axis: heads are exchanged for tokens, and back (Ulysses).

Each of S ranks comes with 1/S of the tokens and all heads, attends with 1/S of the heads over all tokens, and leaves as
it came (Jacobs et al. 2023, "DeepSpeed Ulysses", section 3). What attends in between is the attention that the model
has, and sees complete rows: their mask, their window, their branches. Registered with transformers under a name that
begins with `NAME`; a forward without `exchange` gets the model's own attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from hwgrpo.models import shared_prefix_masks
from hwgrpo.models.shared_prefix_masks import additive, replace_attention, window_of

NAME = "exchanged"

OF_HEADS = ("s_aux", "position_bias")
"""Options of transformers' attention functions with a value for each head, which would have to be exchanged too."""


@dataclass(frozen=True)
class Exchange:
    """The group that exchanges heads and tokens, and the mask over full rows."""

    group: Any
    """The process group; its ranks hold the tokens in order."""
    size: int
    """Ranks of the group; 1: rows are already full, and nothing is exchanged."""
    mask: torch.Tensor | None = None
    """[B, 1, L, L], added to the scores; None: causal attention, or that of the branches."""
    _windows: dict[Any, torch.Tensor] = field(default_factory=dict, compare=False)

    def mask_of(self, window: int | None, query: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of a layer, None where plain causal attention is right.

        Args:
            window: a token sees itself and the window - 1 tokens before it; None: everything before it.
            query: [B, heads, L, D].
        """
        length = query.shape[2]
        if self.mask is not None or window is None or window >= length:
            return self.mask
        key = (window, query.dtype, length)
        if key not in self._windows:
            place = torch.arange(length, device=query.device)
            behind = place[:, None] - place
            self._windows[key] = additive((behind >= 0) & (behind < window), query.dtype)[None, None]
        return self._windows[key]


def enable(model: PreTrainedModel) -> None:
    """Put the exchange around the attention that a model has, if it is not there yet.

    Raises:
        ValueError: that attention takes other masks than transformers' `sdpa`, or cannot be replaced.
    """
    own = model.config._attn_implementation or "eager"
    if own.startswith(NAME):
        return
    if own not in AttentionInterface().valid_keys() or AttentionMaskInterface()[own] is not sdpa_mask:
        raise ValueError(f"{own} attention does not accept masks as sdpa does")
    shared_prefix_masks.enable(model)  # inside, because it splits full rows
    own = model.config._attn_implementation
    name = f"{NAME}_{own}"
    AttentionInterface.register(name, partial(exchanged_attention, attend=AttentionInterface()[own]))
    AttentionMaskInterface.register(name, sdpa_mask)
    replace_attention(model, name)


def exchanged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attend: Callable[..., tuple[torch.Tensor, None]],
    exchange: Exchange | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over full rows with a part of the heads; the signature is that of transformers' attention functions.

    Args:
        module: the attention layer.
        query: [B, heads, L / S, D]; S divides the heads.
        key, value: [B, key-value heads, L / S, D], repeated where S does not divide their heads.
        attention_mask: read where there is no exchange.
        attend: computes with the arguments, masks and results of transformers' `sdpa`.
        exchange: None: `attend` alone.
        options: of `attend`.

    Returns:
        [B, L / S, heads, D'], and no weights.

    Raises:
        ValueError: an option has a value per head; or S does not divide the heads.
    """
    if exchange is None:
        return attend(module, query, key, value, attention_mask, **options)
    size = exchange.size
    of_heads = [name for name in OF_HEADS if options.get(name) is not None]
    if of_heads:
        raise ValueError(f"its attention has {' and '.join(of_heads)}, a value for each head")
    if query.shape[1] % size:
        raise ValueError(f"its {query.shape[1]} attention heads cannot be shared out among {size} ranks")
    if torch.is_autocast_enabled(query.device.type):  # so that no more is sent than attention will read
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    copies = size // math.gcd(key.shape[1], size)
    if copies > 1:
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        module = _Grouped(module, query.shape[1] // key.shape[1])
    if size > 1:
        query, key, value = _to_heads((query, key, value), exchange)
    if options.get("branches") is None:
        attention_mask = exchange.mask_of(window_of(module, options.get("sliding_window")), query)
        options["is_causal"] = attention_mask is None
    output, _ = attend(module, query, key, value, attention_mask, **options)
    return (_to_tokens(output, exchange) if size > 1 else output), None


class _Grouped:
    """An attention layer to those who read how many query heads share a key head."""

    def __init__(self, module: Any, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _to_heads(tensors: Sequence[torch.Tensor], exchange: Exchange) -> list[torch.Tensor]:
    """Make each [B, heads, L / S, D] a [B, heads / S, L, D], in one exchange."""
    size = exchange.size
    parts = [tensor.unflatten(1, (size, -1)).transpose(0, 1) for tensor in tensors]
    sent = torch.cat([part.flatten(1) for part in parts], dim=1)
    received = all_to_all(sent, [1] * size, [1] * size, exchange.group)
    head_shards = received.split([part[0].numel() for part in parts], dim=1)
    return [
        shard.view(part.shape).permute(1, 2, 0, 3, 4).flatten(2, 3)
        for shard, part in zip(head_shards, parts, strict=True)
    ]


def _to_tokens(output: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Make [B, L, heads / S, D] a [B, L / S, heads, D]."""
    size = exchange.size
    parts = output.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    received = all_to_all(parts, [1] * size, [1] * size, exchange.group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def all_to_all(tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Any) -> torch.Tensor:
    """Send rows to each rank of a group and receive some from each; gradients go back the same way.

    Args:
        tensor: [sum(send), ...]: rows for the group's first rank, then for its second, ...
        send: rows for each rank.
        receive: rows from each rank.
        group: the process group.

    Returns:
        [sum(receive), ...] in the order of ranks.
    """
    return _AllToAll.apply(tensor, list(send), list(receive), group)  # type: ignore[return-value]


class _AllToAll(torch.autograd.Function):
    """What torch.distributed.nn had for this is deprecated (torch 2.13), what replaces it is private."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
        ctx.back = receive, send, group
        received = tensor.new_empty(sum(receive), *tensor.shape[1:])
        dist.all_to_all_single(received, tensor.contiguous(), receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return all_to_all(gradients[0], *ctx.back), None, None, None
