"""Declare the sampling ops: `block_sums`, `kept_sums` and `pick`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import sampling_definitions, triton_support
from .matrices import accumulated
from .op import Implementation, Op, Shape
from .ops import ROW_TOLERANCE, SHAPES, row_inputs
from .registry import default_registry
from .sampling_definitions import BLOCK


class _Filters(NamedTuple):
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


_FILTERS = {
    "top_k": _Filters(top_k=7),
    "top_p": _Filters(top_p=0.8),
    "min_p": _Filters(min_p=0.05),
    "all_filters": _Filters(30, 0.9, 0.01),
}
_HAZARDS = ("offset_up", "offset_down", "flat", "masked_vocab", "masked_blocks", "certain")
_LIKELY = 1e-3
"""Least probability of a token that the draw of a test aims at: other roundings of the sums miss it by far less."""


def block_sums_inputs(
    shape: Shape, dtype: torch.dtype, device: str, case: str = "plain", seed: int = 0
) -> dict[str, Any]:
    """Make the arguments of `block_sums`."""
    logits = row_inputs(shape, dtype, device, case, seed)["logits"]
    return {"logits": logits, "temperature": 0.7 if case in ("scaled", "all_filters") else 1.0}


def kept_sums_inputs(
    shape: Shape, dtype: torch.dtype, device: str, case: str = "plain", seed: int = 0
) -> dict[str, Any]:
    """Make the arguments of `kept_sums`, with sums from the definition in fp64 (on the CPU)."""
    inputs = block_sums_inputs(shape, dtype, device, case, seed)
    sums = sampling_definitions.block_sums(inputs["logits"].cpu().double(), inputs["temperature"])
    block_max, block_sum = (each.to(device, accumulated(dtype)) for each in sums)
    filters = _FILTERS.get(case, _FILTERS["all_filters"])
    return {**inputs, "block_max": block_max, "block_sum": block_sum, **filters._asdict()}


def pick_inputs(shape: Shape, dtype: torch.dtype, device: str, case: str = "plain", seed: int = 0) -> dict[str, Any]:
    """Make the arguments of `pick`; uniforms lie in the middle of a likely token's share."""
    inputs = kept_sums_inputs(shape, dtype, device, case, seed)
    filters = {name: inputs.pop(name) for name in _Filters._fields}
    threshold = None
    z = inputs["logits"].cpu().double() / inputs["temperature"]
    if case in _FILTERS:
        exact = {name: value.cpu().double() for name, value in inputs.items() if isinstance(value, Tensor)}
        sums, least, _ = sampling_definitions.kept_sums(**exact, **filters, temperature=inputs["temperature"])
        inputs["block_sum"] = sums.to(device, accumulated(dtype))
        # half way to the next: the same tokens for other roundings of z
        below = z.masked_fill(z >= least[:, None], -torch.inf).amax(1)
        threshold = torch.where(below.isfinite(), (least + below) / 2, least - 1)
        z = z.masked_fill(z < threshold[:, None], -torch.inf)
        threshold = threshold.to(device, accumulated(dtype))
    probability = z.softmax(1).nan_to_num(1 / shape.V)
    uniform = None
    if case != "greedy":
        targets = row_inputs(shape, dtype, device, case, seed)["targets"].cpu()
        likely = probability.gather(1, targets[:, None])[:, 0] >= _LIKELY
        targets = torch.where(likely, targets, probability.argmax(1))[:, None]
        middle = probability.cumsum(1).gather(1, targets) - probability.gather(1, targets) / 2
        uniform = middle[:, 0].to(device, torch.float32)
    return {**inputs, "uniform": uniform, "threshold": threshold}


def _blocks(shape: Shape) -> int:
    return -(-shape.V // BLOCK)


_SUMS = ("plain", "scaled", *_HAZARDS, "dead_row")

block_sums = default_registry.declare(
    Op(
        name="block_sums",
        summary="maximum and sum of exponentials of each block of 256 logits, in one read",
        definition=sampling_definitions.block_sums,
        inputs=block_sums_inputs,
        outputs=("block_max", "block_sum"),
        differentiable=(),
        cases=_SUMS,
        shapes=SHAPES,
        tolerance=ROW_TOLERANCE,
        flops=lambda shape, dtype: 4 * shape.N * shape.V,
        bytes=lambda shape, dtype: shape.N * (shape.V * dtype.itemsize + 8 * _blocks(shape)),
    )
)
kept_sums = default_registry.declare(
    Op(
        name="kept_sums",
        summary="sums of each block over the tokens that top-k, top-p and min-p keep, the threshold and the floor",
        definition=sampling_definitions.kept_sums,
        inputs=kept_sums_inputs,
        outputs=("kept_sum", "threshold", "floor"),
        differentiable=(),
        cases=(*_FILTERS, *_HAZARDS),
        shapes=SHAPES,
        tolerance=ROW_TOLERANCE,
        flops=lambda shape, dtype: 4 * shape.N * shape.V,
        bytes=lambda shape, dtype: shape.N * (shape.V * dtype.itemsize + 12 * _blocks(shape) + 8),
    )
)
pick = default_registry.declare(
    Op(
        name="pick",
        summary="a token of each row by the inverse CDF at its uniform, and its log-probability, from the block sums",
        definition=sampling_definitions.pick,
        inputs=pick_inputs,
        outputs=("token", "logprob"),
        differentiable=(),
        cases=("greedy", *_SUMS, *_FILTERS),
        shapes=SHAPES,
        tolerance=ROW_TOLERANCE,
        flops=lambda shape, dtype: 4 * shape.N * (_blocks(shape) + BLOCK),
        bytes=lambda shape, dtype: shape.N * (min(BLOCK, shape.V) * dtype.itemsize + 8 * _blocks(shape) + 16),
    )
)

for _op in ("block_sums", "kept_sums", "pick"):
    default_registry.register(Implementation(_op, "torch", f"hwgrpo_kernels.sampling_definitions:{_op}"))
    default_registry.register(
        Implementation(
            _op,
            "triton",
            f"hwgrpo_kernels.sampling_triton:{_op}",
            device_types=frozenset({"cuda"}),  # AMD's too: torch calls a ROCm device "cuda"
            requires=("triton",),
            supports=triton_support.reason_against_sampling,
            rank=1,
        )
    )
