"""Sliding windows of attention: those of a configuration, and a model with shortened ones for short tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hwgrpo.models.layer_values import smallest_value

WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "window_size",
    "local_attention",
    "attention_chunk_size",
    "keep_window_size",
    "index_topk",
    "index_topk_blocks",
)
"""Settings that hold how many tokens attention sees, in a block of tokens, before a token or by a selection."""

SHORT = 4
"""Tokens of a shortened window."""

_BLOCKS, _BLOCK = "index_topk_blocks", "index_block_size"
_SHORTENED = dict.fromkeys(WINDOWS, SHORT) | {_BLOCKS: 1, "topk_blocks": 1, _BLOCK: SHORT, "block_size": SHORT}
"""By the names that configurations and modules have for them; one block of as many tokens as a window."""


def windows_below(model_config: Any, longest: int | None) -> dict[str, int]:
    """Return the windows that sequences can outgrow, in tokens, by the name of their setting.

    Args:
        model_config: the transformers configuration of the model.
        longest: tokens of the longest sequence; None: unknown, so that every window counts.
    """
    text = model_config.get_text_config()
    found = {name: _tokens(text, name) for name in WINDOWS if not (name == "sliding_window" and not _slides(text))}
    return {name: size for name, size in found.items() if size and (longest is None or size < longest)}


def rope_switches_at(model_config: Any) -> int | None:
    """Return the length beyond which all tokens of a batch get other rotary embeddings (longrope), None without one."""
    parameters = getattr(model_config.get_text_config(), "rope_parameters", None) or {}
    ropes = [parameters, *(rope for rope in parameters.values() if isinstance(rope, dict))]
    return min((r["original_max_position_embeddings"] for r in ropes if r.get("rope_type") == "longrope"), default=None)


def describe_windows(windows: Mapping[str, int]) -> str:
    """Return windows as `sliding_window=4096, ...`."""
    return ", ".join(f"{name}={size}" for name, size in windows.items())


@contextmanager
def shorten_windows(base: torch.nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Shorten a model's windows to a few tokens within the block, so that short sequences exceed them.

    Layouts, caches and the decode step treat a window of any length alike. What a model derived from a window when it
    was made (a mask in a buffer) stays as it is; `shortening_shows` finds that.

    Args:
        base: a transformers model.
        names: names of the windows.
    """
    fields = set(names)
    if _BLOCKS in fields:
        fields |= {"topk_blocks", _BLOCK, "block_size"}
    if "sliding_window_size" in fields or "local_attention" in fields:
        fields.add("sliding_window")  # their modules' name for it
    before = []
    try:
        for holder in _holders(base):
            for name in fields:
                size = vars(holder).get(name)
                if isinstance(size, int) and not isinstance(size, bool) and size > _SHORTENED[name]:
                    before.append((holder, name, size))
                    setattr(holder, name, _SHORTENED[name])
        yield
    finally:
        for holder, name, size in before:
            setattr(holder, name, size)


def _holders(base: torch.nn.Module) -> list[Any]:
    """Return the modules of a model and all configurations that they read."""
    holders: dict[int, Any] = {}
    for module in base.modules():
        holders[id(module)] = module
        config: Any = getattr(module, "config", None)
        if hasattr(config, "get_text_config"):
            holders[id(config)] = config
            holders[id(config.get_text_config())] = config.get_text_config()
    return list(holders.values())


def _tokens(text: Any, name: str) -> int:
    size = smallest_value(text, name)
    if not isinstance(size, int) or isinstance(size, bool):
        return 0
    return size * int(getattr(text, _BLOCK, 1)) if name == _BLOCKS else size


def _slides(text: Any) -> bool:
    """Return whether some layers have the sliding window of a configuration."""
    kinds = getattr(text, "layer_types", None)
    return "sliding_attention" in kinds if kinds else bool(getattr(text, "use_sliding_window", True))
