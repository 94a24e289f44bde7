"""FLOPs of encoding images: those of a tower's patches, of their pairs, and of the tokens that a projector makes.

The formula is that of text (`hwgrpo.training.update.flops`): 2 FLOPs per weight and position in the forward, 2 more for
the gradient of the input where something before it is trained, 2 more where the weight is. A pair of patches costs 4 x
the width of queries per layer, and twice that in the backward. Patches attend to all of their image; to those of their
tile, where a tower reads images of one size; or to those of their window (Qwen2.5-VL, arXiv 2502.13923, 2.1.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hwgrpo.models.lm_head import causal_lm
from hwgrpo.models.meta_device import full_shape
from hwgrpo.models.placeholders import reads_images
from hwgrpo.models.quantization import quantized_weights
from hwgrpo.models.vision import vision_parameters

FORWARD, BACKWARD, WEIGHT = 2, 2, 2
"""FLOPs per weight and position: its product, the gradient of its input, and its own gradient."""

WITH_CLASS = frozenset({"clip_vision_model", "internvl_vision"})
"""Towers that read images of one size, and add a position for their class."""
TILED = WITH_CLASS | {"idefics3_vision", "siglip_vision_model", "smolvlm_vision"}
"""Towers that read images of one size: a larger image is several of them."""
MERGED = ("spatial_merge_size", "merge_kernel_size", "pooling_kernel_size", "scale_factor", "downsample_factor")
"""Settings with the patches of a side that become one token."""
TOKENS_OF_A_TILE = ("mm_tokens_per_image", "image_seq_length")
OF_PIXELS = ("patch_embed", "patch_conv")
"""Parts of the names of a tower's weights that read pixels, which need no gradient."""
OF_TOKENS = "visual.downsample"
"""Begins the name of a tower's weight that makes tokens of patches (GLM)."""


@dataclass(frozen=True)
class Patches:
    """How the patches of a tower become tokens of the text model."""

    per_token: float
    """Positions of the tower for each token, those of classes included."""
    of_a_tile: int | None
    """Positions of an image that the tower reads by itself; None: it reads images of any size."""
    pixels: int
    """Pixels of an image in a patch."""
    values: int
    """Numbers of a patch: pixels in colors and frames."""


def patches_of(config: Any) -> Patches:
    """Return how a vision-language model's tower divides images.

    Args:
        config: the model's configuration.
    """
    tower = config.vision_config
    side = math.prod(_pair(tower.patch_size))
    values = (getattr(tower, "in_channels", None) or 3) * (getattr(tower, "temporal_patch_size", None) or 1) * side
    tile = None
    if tower.model_type in TILED:
        tile = math.prod(_pair(tower.image_size)) // side
    merged = next((each for name in MERGED for part in (tower, config) if (each := getattr(part, name, None))), None)
    if merged is not None:
        per_token = float(math.prod(_pair(merged)))
    elif tile is not None:
        per_token = tile / next((each for name in TOKENS_OF_A_TILE if (each := getattr(config, name, None))), tile)
    else:
        per_token = 1.0
    if tile is not None and tower.model_type in WITH_CLASS:
        per_token, tile = per_token * (tile + 1) / tile, tile + 1
    return Patches(per_token, tile, side, values)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


@dataclass(frozen=True)
class TowerWork:
    """FLOPs of encoding images."""

    per_patch: float
    """FLOPs per position of the tower in its matrices."""
    per_token: float
    """FLOPs per token in the projector."""
    per_pair: tuple[tuple[int | None, float], ...]
    """(positions of a window or tile, FLOPs per pair of positions in it, over the layers with it); None: all positions
    of an image are one."""
    patches_per_token: float

    def of(self, images: Iterable[int]) -> float:
        """Return the FLOPs of images with so many tokens each."""
        total = 0.0
        for tokens in images:
            patches = tokens * self.patches_per_token
            pairs = sum(flops * patches * min(patches, within or patches) for within, flops in self.per_pair)
            total += self.per_patch * patches + self.per_token * tokens + pairs
        return total


def tower_work(model: Any, *, backward: bool) -> TowerWork | None:
    """Count the FLOPs of a vision-language model's tower and projector, which may be sharded or on the meta device.

    Args:
        model: a transformers model, or one wrapped by peft.
        backward: count a backward pass, too, for what is trained.

    Returns:
        The FLOPs; None for a model of text.
    """
    base = causal_lm(model)
    if not reads_images(base.config):
        return None
    embeddings = {id(each.weight) for each in base.modules() if isinstance(each, nn.Embedding)}
    quantized = {id(parameter): codes.size for parameter, codes in quantized_weights(base).items()}
    per = {"tower": 0.0, "projector": 0.0}
    trains = tower_trains = False
    for part, name, parameter in vision_parameters(model):
        if part not in per:
            continue
        flops = FORWARD
        if backward:
            has_gradient = (
                trains if part == "projector" else tower_trains and not any(each in name for each in OF_PIXELS)
            )
            flops += BACKWARD * has_gradient + WEIGHT * parameter.requires_grad
        trains |= parameter.requires_grad and "." in name  # a parameter of the model itself ends rows of tokens
        tower_trains |= parameter.requires_grad and part == "tower"
        shape = quantized.get(id(parameter), full_shape(parameter))
        # classes and positions are stacks of one matrix
        if len(shape) < 2 or len(shape) == 3 or id(parameter) in embeddings:
            continue
        per["projector" if name.startswith(OF_TOKENS) else part] += flops * math.prod(shape)
    patches = patches_of(base.config)
    pair = 2.0 * FORWARD * attention_width(base.config.vision_config) * (3 if backward and tower_trains else 1)
    per_pair = tuple((within, pair * layers) for within, layers in _windows(base.config.vision_config, patches))
    return TowerWork(per["tower"], per["projector"], per_pair, patches.per_token)


def tower_layers(tower: Any) -> int:
    """Return the layers of a tower, by its configuration."""
    return getattr(tower, "depth", None) or tower.num_hidden_layers


def tower_heads(tower: Any) -> int:
    """Return the heads of a tower, by its configuration."""
    return getattr(tower, "num_heads", None) or tower.num_attention_heads


def tower_width(tower: Any) -> int:
    """Return the width of a tower's hidden states, by its configuration."""
    return getattr(tower, "embed_dim", None) or tower.hidden_size


def attention_width(tower: Any) -> int:
    """Return the width of a tower's queries, by its configuration."""
    head = getattr(tower, "head_dim", None)
    return head * tower_heads(tower) if head else tower_width(tower)


def _windows(tower: Any, patches: Patches) -> list[tuple[int | None, int]]:
    """Return (positions of a window or tile, number of layers with it)."""
    layers, full = tower_layers(tower), getattr(tower, "fullatt_block_indexes", None)
    if full is None:
        return [(patches.of_a_tile, layers)]
    window = (tower.window_size // tower.patch_size) ** 2
    return [(window, layers - len(full)), (None, len(full))]
