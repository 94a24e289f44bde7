"""One decoder layer in fp64, forward and backward from a given gradient, and what rounding does to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hwgrpo.config import Config
from hwgrpo.models.lm_head import backbone
from hwgrpo.parity.golden import (
    DRAWS,
    Gradients,
    clip_coefficient,
    gradient_name,
    gradient_norm,
    outputs_of,
    updated_name,
)
from hwgrpo.parity.layer_states import PrefixStep
from hwgrpo.parity.rounded_operations import Precision, Rounded, in_fp64

BLOCK = 2**15
"""Numbers that are compared at once: as many as a CPU's cache holds, which is ten times as fast as a whole matrix."""
OUTPUT = "output"


def layer_step(
    model: Any,
    layer: str,
    prefixes: PrefixStep,
    upstream: torch.Tensor | None,
    rounded: tuple[Precision, int] | None = None,
) -> tuple[torch.Tensor, Gradients]:
    """Return a layer's output for each prefix, [P, H], and the gradients of its weights and of the embeddings.

    Args:
        model: a one-layer model of transformers in fp64 on the CPU; its embeddings are what enters the layer.
        layer: name of the layer's module.
        prefixes: the step.
        upstream: [P, H] gradient of the output; None: no backward pass.
        rounded: (precision, draw): change the results of operations by up to one rounding.
    """
    names = parameters_of(model, layer)
    parameters = [model.get_parameter(name) for name in names]

    def rounding(part: int) -> AbstractContextManager[Any]:
        return nullcontext() if rounded is None else Rounded(rounded[0], seed=2 * rounded[1] + part)

    with in_fp64():
        with rounding(0), outputs_of(model, [layer]) as outputs:
            backbone(model)(input_ids=prefixes.rows, use_cache=False)
            output = outputs["layer 1"].flatten(0, 1)[prefixes.first]
        if upstream is None:
            return output.detach(), {}
        with rounding(1):
            gradients = torch.autograd.grad(output, parameters, upstream.double(), allow_unused=True)
    return output.detach(), dict(zip(names, gradients, strict=True))


def parameters_of(model: Any, layer: str) -> list[str]:
    """Return the names of a one-layer model's parameters that its layer's output depends on."""
    table = model.get_input_embeddings().weight
    return [name for name, p in model.named_parameters() if p is table or name.startswith(f"{layer}.")]


def rounding_of_layer(
    model: Any,
    layer: str,
    prefixes: PrefixStep,
    upstream: torch.Tensor,
    config: Config,
    precision: Precision,
    output: torch.Tensor,
    exact: Gradients,
) -> dict[str, list[float]]:
    """Return how far rounding moves the output, each gradient and each updated weight, in each of `DRAWS` draws.

    Args:
        model, layer, prefixes, upstream: as for `layer_step`.
        config: settings of the optimizer.
        precision: of the device.
        output, exact: what `layer_step` returns without rounding.
    """
    moved: dict[str, list[float]] = {}
    right_scale = clip_coefficient(gradient_norm(exact), config)
    for draw in range(DRAWS):
        values, gradients = layer_step(model, layer, prefixes, upstream, (precision, draw))
        moved.setdefault(OUTPUT, []).append(float((values - output)[prefixes.is_input].abs().max()))
        scale = clip_coefficient(gradient_norm(gradients), config)
        for name, gradient in gradients.items():
            right = exact[name]
            if gradient is None or right is None:
                continue
            found = effects(gradient, right, scale, right_scale, config)
            moved.setdefault(gradient_name(name), []).append(found["gradient"])
            moved.setdefault(updated_name(name), []).append(found["updated"])
    return moved


def effects(
    gradient: torch.Tensor, right: torch.Tensor, scale: float, right_scale: float, config: Config
) -> dict[str, float]:
    """Return the largest difference of two gradients of a weight, and of the weights after AdamW's step by them.

    Args:
        gradient, right: of one shape.
        scale, right_scale: what clipping multiplies them by.
        config: settings of the optimizer.
    """
    moved = {"gradient": 0.0, "updated": 0.0}
    for _, (g, r) in blocks(gradient, right):
        step = adamw_direction(g * scale, config).sub_(adamw_direction(r * right_scale, config))
        moved["gradient"] = max(moved["gradient"], float((g - r).abs_().max()))
        moved["updated"] = max(moved["updated"], config.optim.lr * float(step.abs_().max()))
    return moved


def adamw_direction(gradient: torch.Tensor, config: Config) -> torch.Tensor:
    """Return what AdamW's first step subtracts from a weight besides its decay, in learning rates."""
    return gradient / (gradient.abs() + config.optim.eps)


def blocks(*tensors: torch.Tensor) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Yield the first row, and the same rows of several tensors of one shape, with about `BLOCK` numbers each.

    A tensor without dimensions has one row.
    """
    tensors = tuple(each.reshape(1) if each.ndim == 0 else each for each in tensors)
    rows = max(1, BLOCK // max(1, tensors[0].shape[1:].numel()))
    for start in range(0, len(tensors[0]), rows):
        yield start, tuple(each[start : start + rows] for each in tensors)
