"""Declare the ops of a decode step: `decode_attention` and `swiglu`."""

from typing import Any

import torch
from torch import Tensor

from . import decode_compiled, decode_definitions, rows_compiled, triton_support
from .op import Implementation, Op, Shape, Tolerance
from .ops import randn
from .registry import default_registry

SHAPES = (Shape(5, 70, 64), Shape(4, 9, 128), Shape(2, 1, 20), Shape(0, 3, 16))
"""Of attention: N rows, prompts of H tokens, head size V. Of the gate: N rows of V columns."""
CAPACITY = 80
"""Response tokens per row: more than a tile of keys."""
_GROUPS = {"plain": 7, "one": 1, "three": 3, "eight": 8}
"""Case -> query heads per key-value head."""
_KV_HEADS = 2
# A query and a key are rounded after their rotation, and so are weights: three roundings where outputs have one.
_ATTENTION_TOLERANCE = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.bfloat16: Tolerance(2**-6, 2**-6),
    torch.float16: Tolerance(2**-9, 2**-9),
}
_GATE_TOLERANCE = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(1e-5, 1e-6),
    torch.bfloat16: Tolerance(2**-8, 2**-8),
    torch.float16: Tolerance(2**-10, 2**-10),
}


def decode_attention_inputs(
    shape: Shape, dtype: torch.dtype, device: str, case: str = "plain", seed: int = 0
) -> dict[str, Any]:
    """Make the arguments of `decode_attention`; NaN where a cache has no tokens."""
    rows, width, size = shape
    group = _GROUPS.get(case, 2)
    places = torch.Generator().manual_seed(seed)

    def at_random(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high + 1, (count,), generator=places)

    # queries, keys and values as a product gives them, side by side
    heads = group * _KV_HEADS
    product = randn(rows, heads + 2 * _KV_HEADS, size, dtype=dtype, device=device, seed=seed)
    query, key, value = product.split((heads, _KV_HEADS, _KV_HEADS), dim=1)
    count = rows // 2 + 1
    of_prompts = at_random(1, width, count)
    of_prompts[0] = width
    length = at_random(1, CAPACITY, rows)
    length[:2] = torch.tensor([1, CAPACITY])[:rows]
    prompt_of = torch.arange(rows) % count
    # images take fewer positions than tokens
    offset = (of_prompts * torch.rand(count, generator=places)).long()[prompt_of]
    angles = torch.arange(width + CAPACITY)[:, None] / 100.0 ** (torch.arange(size // 2) / (size // 2))
    cos, sin = (each.repeat(1, 2).to(device, dtype) for each in (angles.cos(), angles.sin()))
    prompts = randn(2, _KV_HEADS, count, width, size, dtype=dtype, device=device, seed=seed + 1)
    responses = randn(2, _KV_HEADS, rows, CAPACITY, size, dtype=dtype, device=device, seed=seed + 2)
    padding = torch.arange(width) < width - of_prompts[:, None]
    unfilled = torch.arange(CAPACITY) >= length[:, None] - 1
    return {
        "query": query,
        "key": key,
        "value": value,
        "cos": cos,
        "sin": sin,
        "offset": offset.to(device),
        "prompts": prompts.masked_fill(padding[..., None].to(device), torch.nan),
        "prompt_of": prompt_of.to(device),
        "prompt_length": of_prompts[prompt_of].to(device),
        "responses": responses.masked_fill(unfilled[..., None].to(device), torch.nan),
        "length": length.to(device),
        "scaling": size**-0.5,
    }


def swiglu_inputs(shape: Shape, dtype: torch.dtype, device: str, case: str = "plain", seed: int = 0) -> dict[str, Any]:
    """Make the arguments of `swiglu`: one product's halves, or a tensor each."""
    both = randn(shape.N, 2 * shape.V, dtype=dtype, device=device, seed=seed) * 4
    gate, up = both.chunk(2, dim=1)
    return {"gate": gate, "up": up} if case == "halves" else {"gate": gate.contiguous(), "up": up.contiguous()}


def _attended(shape: Shape) -> int:
    """Return the most tokens that a row attends to."""
    return shape.H + CAPACITY


decode_attention = default_registry.declare(
    Op(
        name="decode_attention",
        summary="attention of a token per row over a shared prompt and its own response, whose cache it extends",
        definition=decode_definitions.decode_attention,
        inputs=decode_attention_inputs,
        outputs=("out",),
        differentiable=(),
        cases=tuple(_GROUPS),
        shapes=SHAPES,
        tolerance=_ATTENTION_TOLERANCE,
        flops=lambda shape, dtype: 4 * shape.N * _GROUPS["plain"] * _KV_HEADS * shape.V * _attended(shape),
        bytes=lambda shape, dtype: 2 * shape.N * _KV_HEADS * shape.V * _attended(shape) * dtype.itemsize,
        written=("responses",),
    )
)
swiglu = default_registry.declare(
    Op(
        name="swiglu",
        summary="silu(gate) * up of an MLP, rounded once",
        definition=decode_definitions.swiglu,
        inputs=swiglu_inputs,
        outputs=("out",),
        differentiable=(),
        cases=("plain", "halves"),
        shapes=SHAPES,
        tolerance=_GATE_TOLERANCE,
        flops=lambda shape, dtype: 5 * shape.N * shape.V,
        bytes=lambda shape, dtype: 3 * shape.N * shape.V * dtype.itemsize,
    )
)

for _op in ("decode_attention", "swiglu"):
    default_registry.register(Implementation(_op, "torch", f"hwgrpo_kernels.decode_definitions:{_op}"))
    default_registry.register(
        Implementation(
            _op,
            "triton",
            f"hwgrpo_kernels.decode_triton:{_op}",
            device_types=frozenset({"cuda"}),  # AMD's too: torch calls a ROCm device "cuda"
            requires=("triton",),
            supports=triton_support.reason_against_decoding,
            rank=1,
        )
    )

default_registry.register(
    Implementation(
        "decode_attention",
        "compiled",
        decode_compiled.load_decode_attention,
        device_types=frozenset({"cpu"}),
        supports=rows_compiled.reason_against,
        rank=-1,  # after torch: the local engine prefers it where compiling pays
    )
)
