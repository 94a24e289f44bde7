"""Inputs of the cases at one shape, from the input generators of the ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from hwgrpo_kernels import Shape, definitions, ops, ops_kl
from torch import Tensor

EXACT_ROWS = 64
"""Rows of fp64 logits that exist at a time."""
SHAPES = {
    "A": Shape(8192, 896, 151936),
    "B": Shape(8192, 3584, 151936),
    "C": Shape(32768, 4096, 151936),
    "small": Shape(128, 256, 151936),
}
"""Rows, hidden size and vocabulary: a 0.5B model, a 7B, an 8B with long responses, and one for a CPU in seconds."""


@dataclass(frozen=True)
class LinearProblem:
    """Hidden states against a head.

    Args:
        hidden, weight, targets: [N,H], [V,H], [N] int64.
        advantages: [S] fp32, one per sequence; the N rows are S sequences of equal length.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    advantages: Tensor

    @property
    def row_weight(self) -> Tensor:
        """[N] fp32: dL/dlogprob of the loss that is measured, -advantage / N (GRPO at ratio 1, mean over tokens)."""
        return row_weight(self.advantages, self.hidden.shape[0])


@dataclass(frozen=True)
class LogitsProblem:
    """Logits that exist already.

    Args:
        logits, targets: [N,V], [N] int64.
        row_weight: [N] fp32, dL/dlogprob and dL/dentropy.
        stats: outputs of `row_stats`, [N] fp32 each, rounded from fp64.
    """

    logits: Tensor
    targets: Tensor
    row_weight: Tensor
    stats: tuple[Tensor, Tensor, Tensor, Tensor]

    def compute_reference_stats(self) -> None:
        """Compute the reference statistics now instead of at the first access."""
        _ = self.reference_stats

    @cached_property
    def ref_logits(self) -> Tensor:
        """[N,V] logits of a reference, created at the first access."""
        return ops_kl.ref_logits(self.logits)

    @cached_property
    def reference_stats(self) -> tuple[Tensor, ...]:
        """The further outputs of `row_stats_kl`, [N] fp32 each, rounded from fp64."""
        wide = torch.promote_types(self.logits.dtype, torch.float32)
        exact = exact_dtype(self.logits.device)
        parts = []
        for start in range(0, self.logits.shape[0], EXACT_ROWS):
            rows = slice(start, start + EXACT_ROWS)
            both = (self.logits[rows].to(exact), self.ref_logits[rows].to(exact))
            parts.append(definitions.row_stats_kl(*both, self.targets[rows], 1.0, 0.0, None)[4:])
        return tuple(torch.cat(each).to(wide) for each in zip(*parts))


def linear_problem(shape: Shape, dtype: torch.dtype, device: torch.device) -> LinearProblem:
    """Create the inputs of cases that start from hidden states."""
    made = ops.linear_inputs(shape, dtype, str(device))
    return LinearProblem(made["hidden"], made["weight"], made["targets"], _advantages(shape.N, device))


def logits_problem(shape: Shape, dtype: torch.dtype, device: torch.device) -> LogitsProblem:
    """Create the inputs of cases that start from logits."""
    made = ops.row_inputs(shape, dtype, str(device))
    logits, targets = made["logits"], made["targets"]
    wide = torch.promote_types(dtype, torch.float32)
    parts = []
    for start in range(0, shape.N, EXACT_ROWS):
        rows = slice(start, start + EXACT_ROWS)
        exact = definitions.row_stats(logits[rows].to(exact_dtype(device)), targets[rows], 1.0, 0.0, None, True)
        parts.append([each.to(wide) for each in exact])
    logprob, entropy, row_max, log_sum = (torch.cat(each) for each in zip(*parts))
    weight = row_weight(_advantages(shape.N, device), shape.N)
    return LogitsProblem(logits, targets, weight, (logprob, entropy, row_max, log_sum))


@dataclass(frozen=True)
class CodesProblem:
    """A weight in NF4: codes and scales of 4H x H values, the size of a projection.

    Args:
        packed, scales: see `definitions.dequantize_nf4`.
        out: [4H,H] of the dtype to dequantize to.
    """

    packed: Tensor
    scales: Tensor
    out: Tensor


def weight_shape(shape: Shape) -> Shape:
    """Return rows and columns of the weight of a `CodesProblem`, as N and V."""
    return Shape(4 * shape.H, shape.H, shape.H)


def codes_problem(shape: Shape, dtype: torch.dtype, device: torch.device) -> CodesProblem:
    """Create the inputs of cases that start from a quantized weight."""
    return CodesProblem(**ops.nf4_inputs(weight_shape(shape), dtype, str(device)))


PROBLEMS: dict[str, Callable[[Shape, torch.dtype, torch.device], Any]] = {
    "linear": linear_problem,
    "logits": logits_problem,
    "codes": codes_problem,
}
"""Kind of a case -> what creates its inputs."""


def row_weight(advantages: Tensor, rows: int) -> Tensor:
    """Return -advantage / N for each of N rows in sequences of equal length."""
    return (-advantages / rows).repeat_interleave(rows // advantages.shape[0])


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return fp64, or fp32 for a device that has no fp64."""
    try:
        torch.ones(2, 2, dtype=torch.float64, device=device).mm(torch.ones(2, 2, dtype=torch.float64, device=device))
    except (RuntimeError, TypeError):  # Ascend NPUs
        return torch.float32
    return torch.float64


def _advantages(rows: int, device: torch.device) -> Tensor:
    sequences = next(count for count in (8, 4, 2, 1) if rows % count == 0)
    generator = torch.Generator(str(device)).manual_seed(7)
    return torch.randn(sequences, generator=generator, device=device)
