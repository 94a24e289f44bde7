"""The sides of a case: our implementations, the ops' definition, eager torch; peers are in `peers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from hwgrpo_kernels import Tolerance, default_registry, definitions, linear_logprob, linear_token_loss, token_logprob
from hwgrpo_kernels.op import Key, shape_class
from torch import Tensor

from hwgrpo.bench.kernels.exact import KL_GRAD, STATS, Result
from hwgrpo.bench.kernels.problem import CodesProblem, LinearProblem, LogitsProblem

Group = Literal["ours", "baseline", "peer"]
Work = Callable[[], Result]
Tensors = tuple[str, torch.dtype, int]
"""Device type, dtype and vocabulary: the key of selecting an implementation."""


@dataclass(frozen=True)
class Side:
    """One way to compute a case.

    Args:
        name: readable name; for ours the implementation's name.
        group: ours, baseline or peer.
        work: computes the case once; None: impossible for `reason`.
        pins: op -> implementation pinned while it runs.
        implementations: op -> implementation that runs.
        tensors: key that they are selected for.
        tolerance: largest errors of a side that is timed.
    """

    name: str
    group: Group
    work: Work | None
    tolerance: Tolerance
    pins: Mapping[str, str] = field(default_factory=dict)
    implementations: Mapping[str, str] = field(default_factory=dict)
    tensors: Tensors = ("cpu", torch.float32, 1)
    reason: str = ""

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Pin and resolve this side's implementations within the block, so that selection is not timed."""
        with default_registry.pinned(self.pins):
            for op in self.implementations:
                default_registry.resolve(op, *self.tensors)
            yield


LOOSE = {torch.float64: Tolerance(1e-9, 1e-9), torch.float32: Tolerance(1e-4, 1e-3)}
LOOSE_16_BIT = Tolerance(2e-2, 5e-2)
"""Rounding of other projects' 16-bit kernels: logits of a few nats, gradients of a full matrix."""


def loose(dtype: torch.dtype) -> Tolerance:
    """Return the largest errors of a timed side that is not ours."""
    return LOOSE.get(dtype, LOOSE_16_BIT)


def declared(op: str, dtype: torch.dtype) -> Tolerance:
    """Return the declared tolerance of an op."""
    return next(each for each in default_registry.ops() if each.name == op).tolerance[dtype]


def our_choices(ops: tuple[str, ...], tensors: Tensors) -> list[tuple[str, dict[str, str], dict[str, str]]]:
    """Return (name, pins, op -> implementation) of each distinct way to run a case whose work these ops do.

    Args:
        ops: every op of the case; a name pins all ops that have an implementation of it.
        tensors: key to select for.
    """
    device_type, dtype, vocab = tensors
    usable: dict[str, dict[str, str]] = {}
    for op in ops:
        key = Key(op, device_type, dtype, shape_class(vocab))
        for each in default_registry.implementations(op):
            if each.reason_against(key) is None:
                usable.setdefault(each.name, {})[op] = each.name
    choices: dict[tuple[str, ...], tuple[str, dict[str, str], dict[str, str]]] = {}
    for name, pins in usable.items():
        with default_registry.pinned(pins):
            resolved = {op: default_registry.resolve(op, *tensors).name for op in ops}
        if name in resolved.values():  # false if HWGRPO_KERNELS pins another
            choices.setdefault(tuple(resolved.values()), (name, pins, resolved))
    return list(choices.values())


def leaf(tensor: Tensor, wants: bool = True) -> Tensor:
    """Return the tensor as a new autograd leaf without a gradient of an earlier call."""
    return tensor.detach().requires_grad_(wants)


def with_gradients(outputs: dict[str, Tensor], **leaves: Tensor) -> Result:
    """Return outputs, and the gradients of those leaves that have one."""
    grads = {f"{name}.grad": each.grad for name, each in leaves.items() if each.grad is not None}
    return {name: each.detach() for name, each in outputs.items()} | grads


def eager_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs [N,V] and entropies [N] of logits as trainers without kernels compute them, in fp32 at least."""
    logprobs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    return logprobs, -(logprobs.exp() * logprobs).sum(-1)


def gather(logprobs: Tensor, targets: Tensor) -> Tensor:
    """Return the log-prob [N] of each row's target."""
    return logprobs.gather(1, targets[:, None])[:, 0]


# From hidden states.


def our_score(problem: LinearProblem) -> Result:
    """`linear_logprob` without gradients."""
    with torch.no_grad():
        found = linear_logprob(problem.hidden, problem.weight, problem.targets, with_entropy=True)
    assert found.entropy is not None
    return {"logprob": found.logprob, "entropy": found.entropy}


def our_differentiable(problem: LinearProblem) -> Result:
    """`linear_logprob` and its backward."""
    hidden, weight = leaf(problem.hidden), leaf(problem.weight)
    found = linear_logprob(hidden, weight, problem.targets, with_entropy=True)
    (found.logprob * problem.row_weight).sum().backward()
    assert found.entropy is not None
    return with_gradients({"logprob": found.logprob, "entropy": found.entropy}, hidden=hidden, weight=weight)


def our_loss(problem: LinearProblem, *, frozen: bool = False, logits_dtype: torch.dtype | None = None) -> Result:
    """`linear_token_loss` and its backward."""
    hidden, weight = leaf(problem.hidden), leaf(problem.weight, not frozen)
    found = linear_token_loss(
        hidden, weight, problem.targets, _weighted, rows={"weight": problem.row_weight}, logits_dtype=logits_dtype
    )
    found.loss.backward()
    return with_gradients({"logprob": found.logprob_N, "entropy": found.entropy_N}, hidden=hidden, weight=weight)


def _weighted(stats: Any, rows: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return stats.logprob * rows["weight"], {}


def defined_linear(problem: LinearProblem, *, gradients: bool, frozen: bool = False) -> Result:
    """The definition of `linear_logprob`, with autograd's backward."""
    hidden, weight = leaf(problem.hidden, gradients), leaf(problem.weight, gradients and not frozen)
    logprob, entropy, *_ = definitions.linear_logprob(
        hidden, weight, problem.targets, None, 1.0, 0.0, None, True, None, None
    )
    if gradients:
        (logprob * problem.row_weight).sum().backward()
    return with_gradients({"logprob": logprob, "entropy": entropy}, hidden=hidden, weight=weight)


def eager_linear(problem: LinearProblem, *, gradients: bool, frozen: bool = False) -> Result:
    """A GEMM for all logits, log_softmax, gather; the entropy, which the loss does not read, without a graph."""
    hidden, weight = leaf(problem.hidden, gradients), leaf(problem.weight, gradients and not frozen)
    logits = hidden @ weight.T
    logprobs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    logprob = gather(logprobs, problem.targets)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    if gradients:
        (logprob * problem.row_weight).sum().backward()
    return with_gradients({"logprob": logprob, "entropy": entropy}, hidden=hidden, weight=weight)


# From logits.


def row_stats_of(problem: LogitsProblem, function: Callable[..., Any]) -> Result:
    """One implementation, or the definition, of `row_stats`."""
    found = function(problem.logits, problem.targets, 1.0, 0.0, None, True)
    return dict(zip(STATS, found))


def row_grad_of(problem: LogitsProblem, function: Callable[..., Any], out: Tensor) -> Result:
    """One implementation, or the definition, of `row_grad`, into an existing tensor."""
    weight = problem.row_weight
    function(problem.logits, problem.targets, *problem.stats, weight, weight, 1.0, 0.0, None, out)
    return {"logits.grad": out}


def row_stats_kl_of(problem: LogitsProblem, function: Callable[..., Any]) -> Result:
    """One implementation, or the definition, of `row_stats_kl`."""
    found = function(problem.logits, problem.ref_logits, problem.targets, 1.0, 0.0, None)
    return {**dict(zip(STATS, found)), "kl": found[4]}


def row_grad_kl_of(problem: LogitsProblem, function: Callable[..., Any], out: Tensor) -> Result:
    """One implementation, or the definition, of `row_grad_kl`, into an existing tensor."""
    weights = [problem.row_weight] * 3
    stats = *problem.stats, *problem.reference_stats
    function(problem.logits, problem.ref_logits, problem.targets, *stats, *weights, 1.0, 0.0, None, out)
    return {KL_GRAD: out}


def our_token_logprob(problem: LogitsProblem, *, gradients: bool) -> Result:
    """`token_logprob`, optionally with its backward."""
    logits = leaf(problem.logits, gradients)
    found = token_logprob(logits, problem.targets, with_entropy=True)
    assert found.entropy is not None
    return _backward(logits, found.logprob, found.entropy, problem, gradients)


def defined_token_logprob(problem: LogitsProblem, *, gradients: bool) -> Result:
    """The definition of `token_logprob`, with autograd's backward."""
    logits = leaf(problem.logits, gradients)
    logprob, entropy, *_ = definitions.row_stats(logits, problem.targets, 1.0, 0.0, None, True)
    return _backward(logits, logprob, entropy, problem, gradients)


def eager_token_logprob(problem: LogitsProblem, *, gradients: bool) -> Result:
    """log_softmax, gather and entropy."""
    logits = leaf(problem.logits, gradients)
    logprobs, entropy = eager_stats(logits)
    return _backward(logits, gather(logprobs, problem.targets), entropy, problem, gradients)


def _backward(logits: Tensor, logprob: Tensor, entropy: Tensor, problem: LogitsProblem, gradients: bool) -> Result:
    if gradients:
        ((logprob + entropy) * problem.row_weight).sum().backward()
    return with_gradients({"logprob": logprob, "entropy": entropy}, logits=logits)


# From the codes of a weight.


def our_dequantized(problem: CodesProblem) -> Result:
    """`dequantize_nf4` as the registry selects it."""
    out = problem.out
    choice = default_registry.resolve("dequantize_nf4", out.device.type, out.dtype, out.shape[1])
    return dequantized(problem, choice.function)


def dequantized(problem: CodesProblem, function: Callable[..., Tensor]) -> Result:
    """One implementation, or the definition, of `dequantize_nf4`."""
    return {"out": function(problem.packed, problem.scales, problem.out)}
