"""Sizes of a vision-language model's tower, and the memory and FLOPs of encoding images.

Images are those of the prompt whose images have the most tokens, in every prompt of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hwgrpo.models.lm_head import causal_lm
from hwgrpo.models.tower_work import (
    Patches,
    TowerWork,
    attention_width,
    patches_of,
    tower_layers,
    tower_width,
    tower_work,
)
from hwgrpo.models.vision import vision_modules, vision_parameters

FULL = 4
"""Bytes of an fp32 number."""
UP = ("fc1", "up_proj")
"""Names of the products that widen a layer's hidden states."""
NORMS_OF_HEADS = frozenset({"q_norm", "k_norm", "v_norm"})


@dataclass(frozen=True)
class TowerShape:
    """The sizes of a tower and its projector that determine memory and FLOPs."""

    patches: Patches
    layers: int
    hidden: int
    norm_values: int
    """Numbers that the norms of a layer keep per patch for the backward pass, in fp32."""
    values: int
    """Numbers that the products of a layer keep per patch, in fp32."""
    values_in_16_bits: int
    """The same under autocast, which casts an input once for each product."""
    projector_values: int
    """Numbers that the projector keeps per token."""
    feature_values: int
    """Numbers of a token's features, those of further layers of the text model included (Qwen3-VL)."""
    trained: str
    """What is trained: "none", "projector" or "all", which is the tower, too."""
    forward: TowerWork
    both: TowerWork
    """FLOPs of a forward and a backward pass through what is trained."""

    @property
    def area(self) -> float | None:
        """Pixels that become one token; None: the tower reads images of one size, of which an image is several."""
        return None if self.patches.of_a_tile else self.patches.pixels * self.patches.per_token

    def patches_in(self, images: Sequence[int]) -> int:
        """Return the positions of the tower for images with so many tokens each."""
        return math.ceil(sum(images) * self.patches.per_token)

    def pixel_bytes(self, images: Sequence[int], size: int) -> int:
        """Return the bytes of the pixels of images, in numbers of `size` bytes."""
        return self.patches_in(images) * self.patches.values * size

    def feature_bytes(self, images: Sequence[int], size: int) -> int:
        """Return the bytes of the features of images."""
        return sum(images) * self.feature_values * size

    def layer_bytes(self, images: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes that encoding images without gradients needs at a time: pixels, and a layer's values."""
        values = self.values if dtype == torch.float32 else self.values_in_16_bits
        return self.pixel_bytes(images, dtype.itemsize) + self.patches_in(images) * values * dtype.itemsize

    def activation_bytes(self, images: Sequence[int], dtype: torch.dtype, *, recomputed: bool) -> int:
        """Return about the bytes that encoding images keeps for the backward pass.

        Args:
            images: tokens of each image.
            dtype: compute dtype.
            recomputed: gradient checkpointing keeps each layer's input, and all of one layer at a time.
        """
        if self.trained == "none":
            return 0
        size, patches = dtype.itemsize, self.patches_in(images)
        kept = sum(images) * self.projector_values * size
        if self.trained != "all":
            return kept
        values = self.values if dtype == torch.float32 else self.values_in_16_bits
        layer = FULL * self.norm_values + size * values
        layers = FULL * self.hidden * self.layers + layer if recomputed else layer * self.layers
        return kept + self.pixel_bytes(images, size) + patches * layers


def tower_shape(model: Any) -> TowerShape:
    """Determine the sizes of a vision-language model's tower.

    Args:
        model: a transformers model on the meta device, with what is trained as in a run.
    """
    config = causal_lm(model).config
    tower, patches = config.vision_config, patches_of(config)
    parameters = [(part, p) for part, _, p in vision_parameters(model)]
    trained = {part for part, parameter in parameters if parameter.requires_grad}
    hidden, width, layer = tower_width(tower), attention_width(tower), _layer(model, tower_layers(tower))
    names = [name for name, _ in layer.named_parameters()]
    packed, gated = any("qkv" in name for name in names), any("gate" in name for name in names)
    inner = max(
        p.shape[0] for name, p in layer.named_parameters() if any(up in name for up in UP) and "lora" not in name
    )
    curves = 4 if gated else 3 if getattr(tower, "hidden_act", None) == "quick_gelu" else 2
    # Queries, keys, values and outputs; rotated queries and keys stand beside the product that they are made of.
    values = 4 * width + 3 * width * packed + curves * inner
    values += hidden * sum("lambda_" in name for name in names)  # outputs that are scaled (InternVL)
    casts = (1 if packed else 3) + (2 if gated else 1)
    further = len(getattr(tower, "deepstack_visual_indexes", None) or ())
    forward, both = tower_work(model, backward=False), tower_work(model, backward=True)
    assert forward is not None
    assert both is not None
    return TowerShape(
        patches=patches,
        layers=tower_layers(tower),
        hidden=hidden,
        norm_values=sum(_norm_values(layer, hidden, width)),
        values=values + 2 * hidden,
        values_in_16_bits=values + casts * hidden,
        projector_values=sum(sum(p.shape) for part, p in parameters if part == "projector" and p.ndim == 2),
        feature_values=config.get_text_config().hidden_size * (1 + further),
        trained="all" if "tower" in trained else "projector" if trained else "none",
        forward=forward,
        both=both,
    )


def _layer(model: Any, count: int) -> nn.Module:
    """Return the first layer of the tower, which has `count`."""
    seeing = vision_modules(model, "all")
    stacks = [each for each in seeing if isinstance(each, nn.ModuleList) and len(each) == count]
    return max((stack[0] for stack in stacks), key=lambda layer: sum(p.numel() for p in layer.parameters()))


def _norm_values(layer: nn.Module, hidden: int, width: int) -> Iterator[int]:
    """Yield the numbers that each norm of a layer keeps per patch: its input, and what only some norms scale."""
    for name, module in layer.named_modules():
        if "Norm" in type(module).__name__:
            of = width if name.rpartition(".")[2] in NORMS_OF_HEADS else hidden
            yield of if isinstance(module, nn.LayerNorm) else 2 * of
