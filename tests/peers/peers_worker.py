"""Run with -O by peers_figures.py: ours and the peers on the same problems, in Triton's interpreter; prints JSON.

TRITON_INTERPRET=1 python -O peers_worker.py FOLDER_WITH_PEERS
"""

import dataclasses
import json
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import triton
from hwgrpo_kernels import Implementation, Shape, default_registry, rows_triton

from hwgrpo.bench.kernels import peers, sides
from hwgrpo.bench.kernels.exact import Result, gradient_error
from hwgrpo.bench.kernels.problem import LinearProblem, linear_problem
from tests.peers.peers_interpreter import bf16_sum, let_peers_run

SHAPE = Shape(64, 128, 1000)
SPREAD = 3.0  # standard deviation of the logits
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INTERPRETED = {"row_stats": "interpreted", "row_grad": "interpreted"}
PEERS = [each for each in peers.PEERS if each.distribution != "trl"]  # which is torch, but for NVIDIA and AMD devices


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    let_peers_run(folder)
    for op in INTERPRETED:
        default_registry.register(Implementation(op, "interpreted", f"hwgrpo_kernels.rows_triton:{op}"))
    versions = {each.name: each.version for each in distributions(path=[str(folder)])}
    figures = {name: figures_of(linear(dtype)) for name, dtype in DTYPES.items()}
    checks = {"our kernels are interpreted": rows_triton.interpreted(), "bf16 sums round": bf16_sum_rounds()}
    about = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({"about": about, "versions": versions, "shape": SHAPE, "checks": checks, "figures": figures}))


def linear(dtype: torch.dtype) -> LinearProblem:
    """Return hidden states and a head whose logits spread as those of a model do."""
    problem = linear_problem(SHAPE, dtype, torch.device("cpu"))
    return dataclasses.replace(problem, hidden=problem.hidden * SPREAD)


def figures_of(problem: LinearProblem) -> dict[str, Any]:
    """Return what each side's errors are, by its name."""
    exact = sides.defined_linear(
        dataclasses.replace(problem, hidden=problem.hidden.double(), weight=problem.weight.double()), gradients=True
    )
    found = {}
    with default_registry.pinned(INTERPRETED):
        found["linear_token_loss"] = errors(exact, sides.our_loss(problem))
        found["linear_logprob"] = errors(exact, sides.our_differentiable(problem))
        if problem.hidden.dtype != torch.float32:
            found["linear_token_loss, fp32 logits"] = errors(exact, sides.our_loss(problem, logits_dtype=torch.float32))
    for peer in PEERS:
        reason = peer.cannot("meta", problem.hidden.dtype, SHAPE)  # as if on a device: what stands against the operands
        found[peer.name] = errors(exact, run(peer, problem)) | ({"refused": reason} if reason else {})
    return found


def run(peer: peers.Peer, problem: LinearProblem) -> Result:
    """Return what a peer computes and its gradients, through its adapter."""
    hidden, weight = sides.leaf(problem.hidden), sides.leaf(problem.weight)
    if peer.score is None:
        peer.loss()(hidden, weight, problem.targets, problem.advantages).backward()
        return sides.with_gradients({}, hidden=hidden, weight=weight)
    logprob, entropy = peer.score()(hidden, weight, problem.targets)
    (logprob * problem.row_weight).sum().backward()
    outputs = {"logprob": logprob} if entropy is None else {"logprob": logprob, "entropy": entropy}
    return sides.with_gradients(outputs, hidden=hidden, weight=weight)


def errors(exact: Result, result: Result) -> dict[str, float]:
    """Return the largest difference of values, in nats, and of gradients the norm of the difference over the norm."""
    return {
        name: gradient_error(value, exact[name])
        if name.endswith(".grad")
        else float((value.double() - exact[name]).abs().max())
        for name, value in result.items()
    }


def bf16_sum_rounds() -> bool:
    """Whether a kernel that adds bf16 numbers gives what torch does; the unrepaired interpreter adds bit patterns."""
    a, b = torch.randn(2, 256).bfloat16()
    return torch.equal(bf16_sum(a, b), a + b)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
