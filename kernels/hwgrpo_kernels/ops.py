"""Declare the ops without reference logits (definition, inputs, tolerances, cost), and register implementations."""

from typing import Any

import torch
from torch import Tensor

from . import definitions, library, npu_scoring, rows_compiled, triton_support
from .logit_map import LogitMap
from .matrices import accumulated
from .nf4_format import BLOCK, quantize_nf4
from .op import Implementation, Op, Shape, Tolerance
from .registry import default_registry

# Odd sizes (nothing divides a block), one row, and no row at all.
SHAPES = (Shape(193, 70, 517), Shape(64, 100, 1000), Shape(1, 16, 37), Shape(0, 16, 64))

# Statistics accumulate in fp32 whatever the inputs; a gradient is rounded to the dtype it is returned in.
ROW_TOLERANCE = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.bfloat16: Tolerance(1e-5, 2**-8),
    torch.float16: Tolerance(1e-5, 2**-10),
}
# The GEMM itself rounds logits to the dtype of its operands.
_LINEAR_TOLERANCE = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.bfloat16: Tolerance(2e-2, 2e-2),
    torch.float16: Tolerance(3e-3, 3e-3),
}


def _generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def randn(*size: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    return torch.randn(*size, generator=_generator(device, seed), device=device).to(dtype)


def _map_of(case: str, rows: int, device: str, seed: int) -> LogitMap:
    if case == "scaled":
        return LogitMap(scale=1 / 0.7)
    if case == "softcap":
        return LogitMap(scale=3.0 / 0.7, squash=1 / 3.0)
    if case == "row_scale":
        row_scale = torch.rand(rows, generator=_generator(device, seed), device=device) + 0.5
        return LogitMap(row_scale_N=row_scale.reciprocal())
    return LogitMap()


def _shape_logits(logits: Tensor, targets: Tensor, case: str) -> Tensor:
    """Give logits the numerical hazard of a case."""
    if case == "offset_up":
        return logits + 3e4
    if case == "offset_down":
        return logits - 3e4
    if case == "flat":
        return torch.zeros_like(logits)
    if case == "masked_vocab":  # every third entry is -inf, except targets
        blocked = torch.zeros_like(logits, dtype=torch.bool)
        blocked[:, ::3] = True
        blocked.scatter_(1, targets[:, None], False)
        return logits.masked_fill(blocked, -torch.inf)
    if case == "masked_blocks":  # long runs of -inf, as in a padded vocabulary, except targets
        blocked = torch.ones_like(logits, dtype=torch.bool)
        blocked[:, logits.shape[1] // 2 : -(logits.shape[1] // 4) or None] = False
        blocked.scatter_(1, targets[:, None], False)
        return logits.masked_fill(blocked, -torch.inf)
    if case == "dead_row":
        dead = torch.arange(logits.shape[0], device=logits.device) % 5 == 2
        return logits.masked_fill(dead[:, None], -torch.inf)
    if case == "certain":
        return logits.scatter_add(1, targets[:, None], torch.full_like(logits[:, :1], 25.0))
    return logits


def row_inputs(shape: Shape, dtype: torch.dtype, device: str, case: str = "plain", seed: int = 0) -> dict[str, Any]:
    """Make the arguments of `row_stats` and `token_logprob`."""
    targets = torch.randint(shape.V, (shape.N,), generator=_generator(device, seed + 1), device=device)
    logits = randn(shape.N, shape.V, dtype=torch.float32, device=device, seed=seed)
    mapping = _map_of(case, shape.N, device, seed + 2)
    return {
        "logits": _shape_logits(2 * logits, targets, case).to(dtype),
        "targets": targets,
        "scale": mapping.scale,
        "squash": mapping.squash,
        "row_scale": mapping.row_scale_N,
        "with_entropy": case != "scaled",
    }


def row_grad_inputs(
    shape: Shape, dtype: torch.dtype, device: str, case: str = "plain", seed: int = 0
) -> dict[str, Any]:
    """Make the arguments of `row_grad`, with a fresh `out` and statistics from the definition in fp64 (on the CPU)."""
    inputs = row_inputs(shape, dtype, device, case, seed)
    with_entropy = inputs.pop("with_entropy")
    wide = accumulated(dtype)
    on_cpu: dict[str, Any] = {
        name: value.cpu() if isinstance(value, Tensor) else value for name, value in inputs.items()
    }
    exact = definitions.row_stats(**{**on_cpu, "logits": on_cpu["logits"].double()}, with_entropy=with_entropy)
    stats = [each.clamp(min=torch.finfo(wide).min).to(device, wide) for each in exact[1:]]
    stats = [exact[0].to(device, wide), *stats]
    return {
        **inputs,
        "logprob": stats[0],
        "entropy": stats[1] if with_entropy else None,
        "row_max": stats[2],
        "log_sum": stats[3],
        "grad_logprob": randn(shape.N, dtype=wide, device=device, seed=seed + 3),
        "grad_entropy": randn(shape.N, dtype=wide, device=device, seed=seed + 4) if with_entropy else None,
        "out": torch.empty_like(inputs["logits"]),
    }


def linear_inputs(shape: Shape, dtype: torch.dtype, device: str, case: str = "plain", seed: int = 0) -> dict[str, Any]:
    """Make the arguments of `linear_logprob`."""
    mapping = _map_of(case, shape.N, device, seed + 2)
    return {
        "hidden": randn(shape.N, shape.H, dtype=dtype, device=device, seed=seed),
        "weight": (randn(shape.V, shape.H, dtype=torch.float32, device=device, seed=seed + 5) / shape.H**0.5).to(dtype),
        "targets": torch.randint(shape.V, (shape.N,), generator=_generator(device, seed + 1), device=device),
        "bias": randn(shape.V, dtype=dtype, device=device, seed=seed + 6) if case == "bias" else None,
        "scale": mapping.scale,
        "squash": mapping.squash,
        "row_scale": mapping.row_scale_N,
        "with_entropy": case != "scaled",
        "chunk_rows": 50 if case == "chunks" else None,
        "logits_dtype": None,
    }


def nf4_inputs(shape: Shape, dtype: torch.dtype, device: str, case: str = "plain", seed: int = 0) -> dict[str, Any]:
    """Make the arguments of `dequantize_nf4`: the codes of a weight [N,V], with a fresh `out`."""
    weight = randn(shape.N, shape.V, dtype=torch.float32, device=device, seed=seed)
    if case == "zero_block":
        weight.view(-1)[: 2 * BLOCK] = 0.0
    packed, scales = quantize_nf4(weight)
    return {"packed": packed, "scales": scales, "out": torch.empty_like(weight, dtype=dtype)}


HAZARDS = ("offset_up", "offset_down", "flat", "masked_vocab", "masked_blocks", "dead_row", "certain")
MAPS = ("plain", "scaled", "softcap", "row_scale")
ROW_STATS = ("logprob", "entropy", "row_max", "log_sum")

row_stats = default_registry.declare(
    Op(
        name="row_stats",
        summary="log-probability, entropy and normalizer of each row of logits, in one read",
        definition=definitions.row_stats,
        inputs=row_inputs,
        outputs=ROW_STATS,
        differentiable=(),
        cases=MAPS + HAZARDS,
        shapes=SHAPES,
        tolerance=ROW_TOLERANCE,
        flops=lambda shape, dtype: 8 * shape.N * shape.V,
        bytes=lambda shape, dtype: shape.N * (shape.V * dtype.itemsize + 24),
    )
)
row_grad = default_registry.declare(
    Op(
        name="row_grad",
        summary="gradient of the raw logits from dL/dlogprob and dL/dentropy, in place",
        definition=definitions.row_grad,
        inputs=row_grad_inputs,
        outputs=("out",),
        differentiable=(),
        cases=MAPS + HAZARDS,
        shapes=SHAPES,
        tolerance=ROW_TOLERANCE,
        flops=lambda shape, dtype: 10 * shape.N * shape.V,
        bytes=lambda shape, dtype: shape.N * (2 * shape.V * dtype.itemsize + 32),
    )
)
token_logprob = default_registry.declare(
    Op(
        name="token_logprob",
        summary="log-probability and entropy from logits, differentiable",
        definition=definitions.row_stats,
        inputs=row_inputs,
        outputs=ROW_STATS,
        differentiable=("logits",),
        cases=MAPS + HAZARDS,
        shapes=SHAPES,
        tolerance=ROW_TOLERANCE,
        flops=lambda shape, dtype: 8 * shape.N * shape.V,
        bytes=lambda shape, dtype: shape.N * (shape.V * dtype.itemsize + 24),
    )
)
linear_logprob = default_registry.declare(
    Op(
        name="linear_logprob",
        summary="log-probability and entropy from hidden states and head, without [N,V] logits, differentiable",
        definition=definitions.linear_logprob,
        inputs=linear_inputs,
        outputs=ROW_STATS,
        differentiable=("hidden", "weight", "bias"),
        cases=(*MAPS, "bias", "chunks"),
        shapes=SHAPES,
        tolerance=_LINEAR_TOLERANCE,
        flops=lambda shape, dtype: 2 * shape.N * shape.H * shape.V,
        bytes=lambda shape, dtype: (shape.N + shape.V) * shape.H * dtype.itemsize + 24 * shape.N,
    )
)

dequantize_nf4 = default_registry.declare(
    Op(
        name="dequantize_nf4",
        summary="values of a weight in 4 bits: those of its codes in a table, times the scale of each block",
        definition=definitions.dequantize_nf4,
        inputs=nf4_inputs,
        outputs=("out",),
        differentiable=(),
        cases=("plain", "zero_block"),
        shapes=SHAPES,
        tolerance=ROW_TOLERANCE,
        flops=lambda shape, dtype: shape.N * shape.V,
        bytes=lambda shape, dtype: shape.N * shape.V * (8 * dtype.itemsize + 4 + 32 // BLOCK) // 8,
    )
)

default_registry.register(Implementation("token_logprob", "torch", lambda: library.token_logprob_in_torch))
default_registry.register(Implementation("linear_logprob", "torch", lambda: library.linear_logprob_in_torch))
default_registry.register(Implementation("dequantize_nf4", "torch", "hwgrpo_kernels.nf4_torch:dequantize_nf4"))
default_registry.register(
    Implementation(
        "dequantize_nf4",
        "triton",
        "hwgrpo_kernels.nf4_triton:dequantize_nf4",
        device_types=frozenset({"cuda"}),  # AMD's too: torch calls a ROCm device "cuda"
        requires=("triton",),
        supports=triton_support.reason_against,
        rank=1,
    )
)


def register_row_op(name: str) -> None:
    """Register a row op's implementations in torch and Triton."""
    default_registry.register(Implementation(name, "torch", f"hwgrpo_kernels.rows_torch:{name}"))
    default_registry.register(
        Implementation(
            name,
            "triton",
            f"hwgrpo_kernels.rows_triton:{name}",
            device_types=frozenset({"cuda", "npu"}),  # AMD's too: torch calls a ROCm device "cuda"
            requires=("triton",),
            supports=triton_support.reason_against,
            rank=1,
        )
    )


for _op, _load in (("row_stats", rows_compiled.load_row_stats), ("row_grad", rows_compiled.load_row_grad)):
    register_row_op(_op)
    default_registry.register(
        Implementation(
            _op,
            "compiled",
            _load,
            device_types=frozenset({"cpu"}),
            supports=rows_compiled.reason_against,
            rank=-1,  # after torch, which needs no compiler
        )
    )

default_registry.register(
    Implementation(
        "linear_logprob",
        "npu",
        "hwgrpo_kernels.npu_scoring:linear_logprob",
        device_types=frozenset({"npu"}),
        requires=("torch_npu",),
        supports=npu_scoring.reason_against,
        rank=-1,  # only if requested: it sums in another order than the training pass
        declines=npu_scoring.declines,
    )
)
