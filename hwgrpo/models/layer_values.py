"""Settings of a transformers configuration that may differ between decoder layers (`per_layer_config`, lists).

Reading such a setting from a configuration with `per_layer_config` raises `AmbiguousGlobalPerLayerAttributeError`,
which is no `AttributeError`, so that a default of `getattr` does not apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def layer_values(text: Any, name: str) -> list[Any]:
    """Return a setting's value in each decoder layer, None in those that do not have it.

    Example:
        >>> layer_values(Gemma4TextConfig(num_hidden_layers=3, layer_types=[...]), "head_dim")
        [256, 256, 512]

    Args:
        text: the configuration of a language model, `get_text_config()` of a transformers configuration.
        name: name of the setting.
    """
    if name in _differing(text):
        return [getattr(layer, name, None) for layer in text.per_layer_config]
    value, layers = getattr(text, name, None), getattr(text, "num_hidden_layers", None) or 1
    if isinstance(value, (list, tuple)) and len(value) == layers:  # as Gemma 3n states its intermediate sizes
        return list(value)
    return [value] * layers


def largest_value(text: Any, name: str, default: Any = None) -> Any:
    """Return a setting's value; where layers differ, the largest of those that are set.

    Args:
        text, name: as for `layer_values`.
        default: where it is not set.
    """
    return _chosen(max, text, name, default)


def smallest_value(text: Any, name: str) -> Any:
    """Return a setting's value; where layers differ, the smallest of those that are set. None: not set."""
    return _chosen(min, text, name, None)


def head_sizes(text: Any) -> list[int]:
    """Return the size of an attention head in each decoder layer; 0 in those without heads."""
    return [
        size or (text.hidden_size // heads if heads else 0)
        for size, heads in zip(layer_values(text, "head_dim"), layer_values(text, "num_attention_heads"), strict=True)
    ]


def _chosen(choose: Callable[[list[Any]], Any], text: Any, name: str, default: Any) -> Any:
    values = [value for value in layer_values(text, name) if value is not None]
    if not values:
        return default
    # what all layers share may be of a type without an order
    return values[0] if all(value is values[0] for value in values) else choose(values)


def _differing(text: Any) -> set[str]:
    """Return the names of the settings that differ between layers, with their other names."""
    names: set[str] = getattr(text, "per_layer_attributes", None) or set()
    return names | {other for other, name in getattr(text, "attribute_map", {}).items() if name in names}
