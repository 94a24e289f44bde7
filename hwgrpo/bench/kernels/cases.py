"""Cases of the benchmark: inputs, minimum cost, and the implementations (sides) that are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from hwgrpo_kernels import Op, Shape, Tolerance, default_registry

from hwgrpo.bench.kernels import sides
from hwgrpo.bench.kernels.exact import KL_GRAD, Result
from hwgrpo.bench.kernels.peers import PEERS, Peer
from hwgrpo.bench.kernels.problem import CodesProblem, LinearProblem, LogitsProblem, weight_shape
from hwgrpo.bench.kernels.sides import Side, Tensors, declared, loose, our_choices

Kind = Literal["linear", "logits", "codes"]
Cost = Callable[[Shape, torch.dtype], int]


@dataclass(frozen=True)
class Case:
    """Something that is computed in several ways.

    Args:
        name: what `--only` and documents call it.
        summary: one line of description.
        kind: its input: hidden states, logits or the codes of a quantized weight.
        gives: the outputs that every side must return.
        ops: those that take part in ours.
        flops: of its matrix products at least, without anything computed twice; None where it has none.
        bytes: that must move at least; None where matrix products bound it.
        sides: (case, problem) -> the sides.
        applies: (dtype) -> whether there is such a case.
    """

    name: str
    summary: str
    kind: Kind
    gives: tuple[str, ...]
    ops: tuple[str, ...]
    flops: Cost | None
    bytes: Cost | None
    sides: Callable[[Case, Any], list[Side]]
    applies: Callable[[torch.dtype], bool] = lambda dtype: True


def op(name: str) -> Op:
    """Return a declared op."""
    return next(each for each in default_registry.ops() if each.name == name)


def _gemms(count: int) -> Cost:
    return lambda shape, dtype: count * op("linear_logprob").flops(shape, dtype)


def _moved(*names: str) -> Cost:
    return lambda shape, dtype: sum(op(name).bytes(shape, dtype) for name in names)


def _ours(case: Case, work: Callable[[], Result], tolerance: Tolerance, tensors: Tensors) -> list[Side]:
    return [
        Side(name, "ours", work, tolerance, pins, selected, tensors)
        for name, pins, selected in our_choices(case.ops, tensors)
    ]


def _linear(
    case: Case,
    problem: LinearProblem,
    *,
    ours: Callable[[LinearProblem], Result],
    gradients: bool,
    frozen: bool = False,
    logits_dtype: torch.dtype | None = None,
    peers: bool = True,
) -> list[Side]:
    dtype = problem.hidden.dtype
    tensors = (problem.hidden.device.type, logits_dtype or dtype, problem.weight.shape[0])
    found = _ours(case, partial(ours, problem), declared("linear_logprob", dtype), tensors)
    defined = partial(sides.defined_linear, problem, gradients=gradients, frozen=frozen)
    eager = partial(sides.eager_linear, problem, gradients=gradients, frozen=frozen)
    found.append(Side("definition", "baseline", defined, loose(dtype)))
    found.append(Side("eager", "baseline", eager, loose(dtype)))
    others = PEERS if peers else ()
    return found + [side for each in others if (side := _peer(each, problem, gradients, frozen)) is not None]


def _peer(peer: Peer, problem: LinearProblem, gradients: bool, frozen: bool) -> Side | None:
    """Return a peer's side, with the reason where it cannot run; None where it has nothing to do with the case."""
    if peer.score is None and not gradients:
        return None
    (rows, hidden), vocab = problem.hidden.shape, problem.weight.shape[0]
    tolerance = loose(problem.hidden.dtype)
    reason = f"not installed: {peer.missing}" if peer.missing else ""
    reason = reason or peer.cannot(problem.hidden.device.type, problem.hidden.dtype, Shape(rows, hidden, vocab))
    work = None if reason else partial(_peer_work, peer, problem, gradients, frozen)
    return Side(peer.name, "peer", work, tolerance, reason=reason)


def _peer_work(peer: Peer, problem: LinearProblem, gradients: bool, frozen: bool) -> Result:
    hidden, weight = sides.leaf(problem.hidden, gradients), sides.leaf(problem.weight, gradients and not frozen)
    if peer.loss is not None:
        peer.loss()(hidden, weight, problem.targets, problem.advantages).backward()
        return sides.with_gradients({}, hidden=hidden, weight=weight)
    assert peer.score is not None, f"{peer.name} has neither a score nor a loss"
    with torch.set_grad_enabled(gradients):
        logprob, entropy = peer.score()(hidden, weight, problem.targets)
        if gradients:
            (logprob * problem.row_weight).sum().backward()
    outputs = {"logprob": logprob} if entropy is None else {"logprob": logprob, "entropy": entropy}
    return sides.with_gradients(outputs, hidden=hidden, weight=weight)


def _rows(
    case: Case,
    problem: LogitsProblem,
    *,
    ours: Callable[[LogitsProblem], Result],
    defined: Callable[[LogitsProblem], Result],
    eager: Callable[[LogitsProblem], Result] | None = None,
) -> list[Side]:
    dtype = problem.logits.dtype
    tensors = (problem.logits.device.type, dtype, problem.logits.shape[1])
    found = _ours(case, partial(ours, problem), declared("row_stats", dtype), tensors)
    found.append(Side("definition", "baseline", partial(defined, problem), loose(dtype)))
    if eager is not None:
        found.append(Side("eager", "baseline", partial(eager, problem), loose(dtype)))
    return found


def _row_op(case: Case, problem: LogitsProblem) -> list[Side]:
    """Sides of a row op itself: each implementation called as it is registered."""
    out = (torch.empty_like(problem.logits),) if "grad" in case.name else ()
    if case.name.endswith("_kl"):
        problem.compute_reference_stats()  # before anything is measured

    def call(function: Callable[..., Any], problem: LogitsProblem) -> Result:
        return getattr(sides, f"{case.name}_of")(problem, function, *out)

    def chosen(problem: LogitsProblem) -> Result:
        logits = problem.logits
        choice = default_registry.resolve(case.name, logits.device.type, logits.dtype, logits.shape[1])
        return call(choice.function, problem)

    return _rows(case, problem, ours=chosen, defined=partial(call, op(case.name).definition))


def _token_logprob(case: Case, problem: LogitsProblem, *, gradients: bool) -> list[Side]:
    return _rows(
        case,
        problem,
        ours=partial(sides.our_token_logprob, gradients=gradients),
        defined=partial(sides.defined_token_logprob, gradients=gradients),
        eager=partial(sides.eager_token_logprob, gradients=gradients),
    )


def _dequantized(case: Case, problem: CodesProblem) -> list[Side]:
    dtype, (_, columns) = problem.out.dtype, problem.out.shape
    tensors = (problem.out.device.type, dtype, columns)
    defined = partial(sides.dequantized, problem, op("dequantize_nf4").definition)
    found = _ours(case, partial(sides.our_dequantized, problem), declared("dequantize_nf4", dtype), tensors)
    return [*found, Side("definition", "baseline", defined, loose(dtype))]


_STATS = ("logprob",)
_LINEAR = ("hidden.grad", "weight.grad")
_HEAD_OPS = ("linear_logprob", "row_stats")
_LOSS_OPS = ("row_stats", "row_grad")

CASES = (
    Case(
        "linear_logprob",
        "log-probs and entropies from hidden states, no gradient",
        "linear", _STATS, _HEAD_OPS, _gemms(1), None,
        partial(_linear, ours=sides.our_score, gradients=False),
    ),
    Case(
        "linear_logprob+grad",
        "the same, with gradients of hidden states and head from autograd",
        "linear", (*_STATS, *_LINEAR), (*_HEAD_OPS, "row_grad"), _gemms(3), None,
        partial(_linear, ours=sides.our_differentiable, gradients=True, peers=False),
    ),
    Case(
        "linear_token_loss",
        "a loss of log-probs, with gradients of hidden states and head",
        "linear", _LINEAR, _LOSS_OPS, _gemms(3), None,
        partial(_linear, ours=sides.our_loss, gradients=True),
    ),
    Case(
        "linear_token_loss-frozen",
        "the same with a frozen head: the gradient of hidden states",
        "linear", ("hidden.grad",), _LOSS_OPS, _gemms(2), None,
        partial(_linear, ours=partial(sides.our_loss, frozen=True), gradients=True, frozen=True),
    ),
    Case(
        "linear_token_loss-fp32",
        "the trainable head with logits kept in fp32",
        "linear", _LINEAR, _LOSS_OPS, _gemms(3), None,
        partial(
            _linear,
            ours=partial(sides.our_loss, logits_dtype=torch.float32),
            gradients=True,
            logits_dtype=torch.float32,
            peers=False,
        ),
        applies=lambda dtype: dtype.itemsize == 2,
    ),
    Case(
        "row_stats",
        "log-probs, entropies and normalisers of given logits",
        "logits", _STATS, ("row_stats",), None, _moved("row_stats"),
        _row_op,
    ),
    Case(
        "row_grad",
        "the gradient of given logits, into an existing tensor",
        "logits", ("logits.grad",), ("row_grad",), None, _moved("row_grad"),
        _row_op,
    ),
    Case(
        "row_stats_kl",
        "the same as row_stats, and the KL to reference logits",
        "logits", (*_STATS, "kl"), ("row_stats_kl",), None, _moved("row_stats_kl"),
        _row_op,
    ),
    Case(
        "row_grad_kl",
        "the same as row_grad, with the gradient of the KL",
        "logits", (KL_GRAD,), ("row_grad_kl",), None, _moved("row_grad_kl"),
        _row_op,
    ),
    Case(
        "token_logprob",
        "log-probs and entropies of given logits",
        "logits", _STATS, ("token_logprob", "row_stats"), None, _moved("token_logprob"),
        partial(_token_logprob, gradients=False),
    ),
    Case(
        "token_logprob+grad",
        "the same, with the gradient of the logits from both",
        "logits", (*_STATS, "logits.grad"), ("token_logprob", "row_stats", "row_grad"), None,
        _moved("token_logprob", "row_grad"),
        partial(_token_logprob, gradients=True),
    ),
    Case(
        "dequantize_nf4",
        "values of a weight in 4 bits, four times the hidden size by it",
        "codes", ("out",), ("dequantize_nf4",), None,
        lambda shape, dtype: op("dequantize_nf4").bytes(weight_shape(shape), dtype),
        _dequantized,
    ),
)  # fmt: skip


def fault(case: Case, side: Side, result: Result, errors: dict[str, float]) -> str:
    """Describe the error of a side's result; "" if it is right."""
    faults = [f"it gives no {name}" for name in case.gives if name not in result]
    for name, error in errors.items():
        limit = side.tolerance.backward if name.endswith((".grad", "out")) else side.tolerance.forward
        if not error <= limit:
            faults.append(f"its {name} is {error:.1e} from fp64's ({limit:.0e} allowed)")
    return "; ".join(faults)
