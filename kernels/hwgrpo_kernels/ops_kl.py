"""Declare the row ops with reference logits: `row_stats_kl` and `row_grad_kl`."""

from typing import Any

import torch
from torch import Tensor

from . import definitions
from .op import Op, Shape
from .ops import HAZARDS, MAPS, ROW_STATS, ROW_TOLERANCE, SHAPES, randn, register_row_op, row_grad_inputs, row_inputs
from .registry import default_registry

_REFERENCES = ("near", "same", "ref_offset", "ref_masked", "ref_dead_row", "masked_alike")
_STATS = (*ROW_STATS, "kl", "kl_others", "ref_logprob", "ref_max", "ref_log_sum")


def ref_logits(logits: Tensor, case: str = "plain", seed: int = 0) -> Tensor:
    """Return reference logits [N,V], with the numerical hazard of a case."""
    noise = 2 * randn(*logits.shape, dtype=torch.float32, device=str(logits.device), seed=seed + 9)
    if case == "same":
        return logits.clone()
    if case == "near":
        return (logits + 0.01 * noise).to(logits.dtype)
    if case == "ref_offset":
        return (noise - 3e4).to(logits.dtype)
    if case == "ref_masked":  # every other row has tokens that the policy can draw and the reference cannot
        noise[::2, 1::3] = -torch.inf
    if case == "ref_dead_row":
        noise[::5] = -torch.inf
    if case == "certain":  # the reference is nearly as certain, or not at all
        noise[::2] += 0.9 * logits[::2]
    if case == "masked_alike":
        noise = noise.masked_fill(logits == -torch.inf, -torch.inf)
    return noise.to(logits.dtype)


def _policy_case(case: str) -> str:
    """Return the case of the policy's own logits."""
    if case == "masked_alike":
        return "masked_vocab"
    return "plain" if case in _REFERENCES else case


def row_kl_inputs(shape: Shape, dtype: torch.dtype, device: str, case: str = "plain", seed: int = 0) -> dict[str, Any]:
    """Make the arguments of `row_stats_kl`."""
    inputs = row_inputs(shape, dtype, device, _policy_case(case), seed)
    del inputs["with_entropy"]
    logits = inputs.pop("logits")
    return {"logits": logits, "ref_logits": ref_logits(logits, case, seed), **inputs}


def row_grad_kl_inputs(
    shape: Shape, dtype: torch.dtype, device: str, case: str = "plain", seed: int = 0
) -> dict[str, Any]:
    """Make the arguments of `row_grad_kl`; rows whose KL is infinite, and some others, get no gradient from it."""
    inputs = row_grad_inputs(shape, dtype, device, _policy_case(case), seed)
    logits = inputs.pop("logits")
    wide = inputs["logprob"].dtype
    both = {"logits": logits, "ref_logits": ref_logits(logits, case, seed)}
    mapping = {name: inputs[name] for name in ("targets", "scale", "squash", "row_scale")}
    on_cpu: dict[str, Any] = {
        name: value.cpu() if isinstance(value, Tensor) else value for name, value in {**both, **mapping}.items()
    }
    on_cpu |= {name: on_cpu[name].double() for name in both}
    exact = dict(zip(_STATS, definitions.row_stats_kl(**on_cpu)))
    grad_kl = randn(shape.N, dtype=wide, device=device, seed=seed + 8)
    grad_kl[1::4] = 0.0
    grad_kl[~exact["kl"].isfinite().to(device)] = 0.0
    return {
        **both,
        **inputs,
        **{name: exact[name].to(device, wide) for name in _STATS[4:7]},
        **{name: exact[name].clamp(min=torch.finfo(wide).min).to(device, wide) for name in _STATS[7:]},
        "grad_kl": grad_kl,
    }


row_stats_kl = default_registry.declare(
    Op(
        name="row_stats_kl",
        summary="row_stats, and the full KL from reference logits",
        definition=definitions.row_stats_kl,
        inputs=row_kl_inputs,
        outputs=_STATS,
        differentiable=(),
        cases=MAPS + HAZARDS + _REFERENCES,
        shapes=SHAPES,
        tolerance=ROW_TOLERANCE,
        flops=lambda shape, dtype: 16 * shape.N * shape.V,
        bytes=lambda shape, dtype: shape.N * (2 * shape.V * dtype.itemsize + 44),
    )
)
row_grad_kl = default_registry.declare(
    Op(
        name="row_grad_kl",
        summary="row_grad, also from dL/dkl",
        definition=definitions.row_grad_kl,
        inputs=row_grad_kl_inputs,
        outputs=("out",),
        differentiable=(),
        cases=MAPS + HAZARDS + _REFERENCES,
        shapes=SHAPES,
        tolerance=ROW_TOLERANCE,
        flops=lambda shape, dtype: 14 * shape.N * shape.V,
        bytes=lambda shape, dtype: shape.N * (3 * shape.V * dtype.itemsize + 56),
    )
)

for _op in ("row_stats_kl", "row_grad_kl"):
    register_row_op(_op)
