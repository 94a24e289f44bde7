"""Exact results in fp64, a few rows at a time from the ops' definitions, and errors against them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from hwgrpo_kernels import definitions
from torch import Tensor

from hwgrpo.bench.kernels.problem import EXACT_ROWS, CodesProblem, LinearProblem, LogitsProblem, exact_dtype

Result = Mapping[str, Tensor]
"""Outputs by name: logprob, entropy [N] (with row_max, log_sum), and gradients under `hidden.grad`, ..."""
STATS = ("logprob", "entropy", "row_max", "log_sum")
KL_GRAD = "logits_kl.grad"
"""The gradient of given logits from a KL, in addition."""


class LinearTruth:
    """Log-probs, entropies and gradients of a linear problem under the loss sum(row_weight * logprob).

    Args:
        problem: the inputs.
        gradients: whether any result to be compared has some.
    """

    def __init__(self, problem: LinearProblem, gradients: bool = True) -> None:
        place = _place(problem.weight)
        weight, hidden, targets = (
            problem.weight.to(**place),
            problem.hidden.to(**place),
            problem.targets.to(**_on(place)),
        )
        row_weight = problem.row_weight.to(**place)
        self._exact: dict[str, Tensor] = {}
        stats: list[tuple[Tensor, ...]] = []
        if gradients:
            self._exact = {"hidden.grad": torch.empty_like(hidden), "weight.grad": torch.zeros_like(weight)}
        for rows in _chunks(hidden):
            logits = hidden[rows] @ weight.T
            found = definitions.row_stats(logits, targets[rows], 1.0, 0.0, None, True)
            stats.append(found[:2])
            if gradients:
                grad = definitions.row_grad(
                    logits, targets[rows], found[0], None, found[2], found[3], row_weight[rows], None,
                    1.0, 0.0, None, logits,
                )  # fmt: skip
                self._exact["hidden.grad"][rows] = grad @ weight
                self._exact["weight.grad"].addmm_(grad.T, hidden[rows])
        self._exact["logprob"], self._exact["entropy"] = (torch.cat(each) for each in zip(*stats))

    def errors(self, result: Result) -> dict[str, float]:
        """Return the error of each output, see `forward_error` and `gradient_error`."""
        return {
            name: (gradient_error if name.endswith(".grad") else forward_error)(value, self._exact[name])
            for name, value in result.items()
        }


class LogitsTruth:
    """Statistics and gradients of given logits under the loss sum(row_weight * (logprob + entropy)), and with a KL.

    Args:
        problem: the inputs.
    """

    def __init__(self, problem: LogitsProblem) -> None:
        self._problem, self._place = problem, _place(problem.logits)

    def errors(self, result: Result) -> dict[str, float]:
        """Return the error of each output; [N,V] gradients are compared a few rows at a time."""
        problem, place = self._problem, self._place
        errors: dict[str, float] = {}
        squared: dict[str, list[float]] = {}  # of the difference and of the exact gradient
        for rows in _chunks(problem.logits):
            logits, targets = problem.logits[rows].to(**place), problem.targets[rows].to(**_on(place))
            found = definitions.row_stats(logits, targets, 1.0, 0.0, None, True)
            for name, exact in zip(STATS, found):
                if name in result:
                    errors[name] = _worse(errors.get(name, 0.0), forward_error(result[name][rows], exact))
            if "logits.grad" in result:
                weight = problem.row_weight[rows].to(**place)
                grad = definitions.row_grad(logits, targets, *found, weight, weight, 1.0, 0.0, None, logits)
                _add_squares(squared, "logits.grad", result["logits.grad"][rows].to(**place), grad)
            if "kl" in result or KL_GRAD in result:
                ref_logits = problem.ref_logits[rows].to(**place)
                stats = definitions.row_stats_kl(logits, ref_logits, targets, 1.0, 0.0, None)
                if "kl" in result:
                    errors["kl"] = _worse(errors.get("kl", 0.0), forward_error(result["kl"][rows], stats[4]))
                if KL_GRAD in result:
                    weight = problem.row_weight[rows].to(**place)
                    out = torch.empty_like(logits)
                    grad = definitions.row_grad_kl(
                        logits, ref_logits, targets, *stats, weight, weight, weight, 1.0, 0.0, None, out
                    )
                    _add_squares(squared, KL_GRAD, result[KL_GRAD][rows].to(**place), grad)
        for name, (difference, squares) in squared.items():
            errors[name] = (difference / squares) ** 0.5 if squares else difference**0.5
        return errors


class CodesTruth:
    """Values of a weight in NF4.

    Args:
        problem: the inputs.
    """

    def __init__(self, problem: CodesProblem) -> None:
        on_host = (problem.packed.cpu(), problem.scales.cpu())
        self._exact = definitions.dequantize_nf4(*on_host, torch.empty(problem.out.shape, dtype=torch.float64))

    def errors(self, result: Result) -> dict[str, float]:
        """Return the error of each output, see `gradient_error`."""
        return {name: gradient_error(value, self._exact) for name, value in result.items()}


Truth = LinearTruth | LogitsTruth | CodesTruth
TRUTHS = {"linear": LinearTruth, "logits": LogitsTruth, "codes": CodesTruth}
"""Kind of a case -> its exact results."""


def _add_squares(squared: dict[str, list[float]], name: str, found: Tensor, exact: Tensor) -> None:
    total = squared.setdefault(name, [0.0, 0.0])
    total[0] += float((found - exact).square().sum())
    total[1] += float(exact.square().sum())


def forward_error(found: Tensor, exact: Tensor) -> float:
    """Return the largest |a - b| / (1 + |b|); infinite where shapes differ."""
    if found.shape != exact.shape:
        return float("inf")
    return float(((found.to(exact) - exact).abs() / (1 + exact.abs())).max())


def gradient_error(found: Tensor, exact: Tensor) -> float:
    """Return ||a - b|| / ||b||; infinite where shapes differ."""
    if found.shape != exact.shape:
        return float("inf")
    return float((found.to(exact) - exact).norm() / exact.norm().clamp(min=1e-30))


def _worse(a: float, b: float) -> float:
    return b if b != b else max(a, b)  # a NaN stays


def _place(tensor: Tensor) -> dict:
    """Return device and dtype of the exact results: fp64 on the device, or on the host if it has none."""
    if exact_dtype(tensor.device) == torch.float64:
        return {"device": tensor.device, "dtype": torch.float64}
    return {"device": torch.device("cpu"), "dtype": torch.float64}


def _on(place: dict) -> dict:
    return {"device": place["device"]}


def _chunks(rows: Tensor) -> Iterator[slice]:
    for start in range(0, rows.shape[0], EXACT_ROWS):
        yield slice(start, start + EXACT_ROWS)
