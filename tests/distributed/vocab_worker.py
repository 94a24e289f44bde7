"""Run by torchrun: a head sharded over all ranks; writes the results of rank R to OUT/R.json.

torchrun --nproc-per-node 4 vocab_worker.py OUT
"""

import glob
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Keeps the default group that exists while it is imported, for ever; a custom op's first call under autograd would.
import torch.distributed.nn.functional
from hwgrpo_kernels import default_registry, linear_logprob, linear_token_loss
from hwgrpo_kernels.streaming import row_kernels
from hwgrpo_kernels.vocab_parallel import VocabShard
from torch import Tensor

from tests.distributed.vocab_cases import (
    DTYPES,
    MASK,
    H,
    N,
    V,
    comparisons,
    cuts,
    make,
    near_certain,
    part_of,
    relative,
)
from tests.kernels.token_loss_cases import centred, ppo


def certain_digits(ranks: int) -> float:
    """Largest relative error of a nearly certain target's log-probability, in fp32 to fp64."""
    bounds, rank = cuts(ranks), dist.get_rank()
    first, stop = bounds[rank : rank + 2]

    def logprob(p: Any) -> Tensor:
        return linear_logprob(p.hidden, p.weight[first:stop], p.targets, vocab_group=dist.group.WORLD).logprob.detach()

    single, double = make(torch.float32, near_certain), make(torch.float64, near_certain)
    assert torch.equal(single.targets, double.targets)
    others = (double.hidden @ double.weight.T).softmax(1).scatter(1, double.targets[:, None], 0.0).sum(1)
    assert 0 < others.min() < others.max() < torch.finfo(torch.float32).eps
    truth = torch.log1p(-others)
    return ((logprob(single).double() - truth).abs() / truth.abs()).max().item()


def bf16_errors(ranks: int) -> dict[str, float]:
    """Error of each gradient in bf16 to fp64, as a multiple of the full head's error."""
    p, bounds, rank = make(torch.bfloat16, n=256, h=32), cuts(ranks), dist.get_rank()
    first, stop = bounds[rank : rank + 2]

    def grads(weight: Tensor, group: Any, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        hidden = p.hidden.detach().to(dtype).requires_grad_()
        weight = weight.detach().to(dtype).requires_grad_()
        rows = {name: each.to(torch.promote_types(dtype, torch.float32)) for name, each in p.rows.items()}
        linear_token_loss(hidden, weight, p.targets, ppo, rows=rows, chunk_rows=64, vocab_group=group).loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        assert hidden.grad.dtype == dtype
        return [hidden.grad, weight.grad]

    truth, whole = grads(p.weight, None, torch.float64), grads(p.weight, None)
    mine = grads(p.weight[first:stop], dist.group.WORLD)
    return {
        "hidden": relative(mine[0], truth[0]) / relative(whole[0], truth[0]),
        "weight": relative(mine[1], truth[1][first:stop]) / relative(whole[1][first:stop], truth[1][first:stop]),
    }


def sum_of_small_and_large(ranks: int) -> list[float]:
    """In bf16, where 256 + 1 = 256: the sum over ranks of which one has 256 and each other 1, each rank once."""
    rank = dist.get_rank()
    partial = torch.ones(ranks, 1, dtype=torch.bfloat16).index_fill(0, torch.tensor([rank]), 256.0)
    shard = VocabShard([1] * ranks, rank, dist.group.WORLD, torch.device("cpu"))
    return shard.all_reduce(partial).flatten().tolist()


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the collectives of the block."""
    counts, kept = {"all_gather_object": 0, "all_gather": 0, "all_reduce": 0}, {}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return kept[name](*args, **kwargs)

        return call

    for name in counts:
        kept[name] = getattr(dist, name)
        setattr(dist, name, counting(name))
    yield counts
    for name, function in kept.items():
        setattr(dist, name, function)


def collectives(ranks: int) -> dict[str, dict[str, int]]:
    """How often the ranks talk in one call over 5 chunks, by scope and by what is trained."""
    bounds, rank, found = cuts(ranks), dist.get_rank(), {}
    calls: tuple[tuple[str, Any, tuple[str, ...], Any], ...] = (
        ("token", ppo, (), "token"),
        ("batch", centred, (), "batch"),
        ("frozen hidden", ppo, ("hidden",), "token"),
    )
    for name, fn, frozen, scope in calls:
        p = make(torch.float32, frozen=frozen)
        with counted() as counts:
            weight, _ = part_of(p, *bounds[rank : rank + 2])
            linear_token_loss(
                p.hidden, weight, p.targets, fn, rows=p.rows, scope=scope, chunk_rows=10, vocab_group=dist.group.WORLD
            ).loss.backward()
        found[name] = counts
    return found


def refusals(ranks: int) -> dict[str, str]:
    """Errors of each rank for arguments that are wrong on rank 1 only, or on all."""
    bounds, rank, said = cuts(ranks), dist.get_rank(), {}
    p = make(torch.float32)
    weight = p.weight[bounds[rank] : bounds[rank + 1]].detach()
    odd = rank == 1
    usual: dict[str, Any] = {"hidden_NH": p.hidden, "weight_VH": weight, "targets_N": p.targets, "rows": p.rows}
    fewer = {name: each[:-1] for name, each in p.rows.items()}
    group_of_rank_0 = dist.new_group([0])
    wrong: dict[str, dict[str, Any]] = {
        "H of weight": {"weight_VH": weight[:, : H - odd]},
        "targets": {"targets_N": p.targets + V // 2},
        "targets on one rank": {"targets_N": p.targets + V * odd},
        "N": {"hidden_NH": p.hidden[:-1], "targets_N": p.targets[:-1], "rows": fewer} if odd else {},
        "row_mask": {"row_mask": MASK if odd else ~MASK},
        "requires_grad": {"hidden_NH": p.hidden.detach() if odd else p.hidden},
        "chunk_rows": {"chunk_rows": 10 + odd},
        "scope": {"scope": "batch" if odd else "token"},
        "temperature": {"temperature": -1.0},
        "no tensor": {"targets_N": None} if odd else {},
        "no hidden states": {"hidden_NH": p.hidden.tolist()} if odd else {},
        "an error of another type": {"row_mask": MASK}
        | ({"rows": FailsLater(p.rows, KeyError("shape"))} if odd else {}),
        "an empty error": {"row_mask": MASK} | ({"rows": FailsLater(p.rows, RuntimeError())} if odd else {}),
        "another mask": {"targets_N": 0 * p.targets, "row_mask": MASK.roll(1) if odd else MASK},
        "order of targets": {"targets_N": p.targets.flip(0) if odd else p.targets},
        "cu_seqlens": {"scope": "sequence", "cu_seqlens": torch.tensor([0, 10, 20, N] if odd else [0, 5, 25, N])},
        "group": {"vocab_group": group_of_rank_0} if rank else {"temperature": -1.0},
    }
    for name, change in wrong.items():
        arguments = {"loss_fn": ppo, "vocab_group": dist.group.WORLD, **usual, **change}
        if name == "group" and rank == 0:
            continue
        said[name] = refusal(linear_token_loss, **arguments)
    usual["vocab_group"] = dist.group.WORLD
    with pinned_to_triton(odd):
        said["pin"] = refusal(linear_token_loss, loss_fn=ppo, **usual)
        said["logprob pin"] = refusal(linear_logprob, p.hidden, weight, p.targets, vocab_group=dist.group.WORLD)
    for name, hidden, chunk_rows in (
        ("logprob H", p.hidden[:, : H - odd], None),
        ("logprob chunk_rows", p.hidden, 5 + odd),
    ):
        said[name] = refusal(
            linear_logprob, hidden, weight, p.targets, chunk_rows=chunk_rows, vocab_group=dist.group.WORLD
        )
    return said


def refusal(function: Any, *args: Any, **arguments: Any) -> str:
    try:
        function(*args, **arguments)
    except (ValueError, KeyError, RuntimeError) as error:
        error.__traceback__ = None  # its frames hold the group
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextmanager
def pinned_to_triton(here: bool) -> Iterator[None]:
    """Pin the row kernels, on this rank, to an implementation that cannot run on a CPU."""
    if here:
        os.environ["HWGRPO_KERNELS"] = "row_stats=triton"
    default_registry.configure()
    yield
    os.environ.pop("HWGRPO_KERNELS", None)
    default_registry.configure()


class FailsLater(dict[str, Any]):
    """Rows that pass the checks, and raise another error when the unmasked ones are selected."""

    def __init__(self, rows: dict[str, Any], error: Exception) -> None:
        super().__init__(rows)
        self._error, self._asked = error, 0

    def items(self) -> Any:
        self._asked += 1
        if self._asked > 1:
            raise self._error
        return super().items()


def outside(ranks: int) -> dict[str, list[bool]]:
    """Which rows are NaN where the first target is below the vocabulary and the last beyond it."""
    bounds, rank = cuts(ranks), dist.get_rank()
    sizes = [b - a for a, b in pairwise(bounds)]
    shard = VocabShard(sizes, rank, dist.group.WORLD, torch.device("cpu"))
    kernels = shard.kernels(row_kernels("cpu", torch.float32, sizes[rank], with_reference=True))
    targets, g = torch.tensor([-100, 3, V]), torch.ones(3)
    logits, ref_logits = (torch.randn(3, V, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    mine, its = (each[:, bounds[rank] : bounds[rank + 1]].contiguous() for each in (logits, ref_logits))
    stats = kernels.stats(mine, targets, 1.0, 0.0, None, True)
    assert kernels.stats_kl is not None
    with_kl = kernels.stats_kl(mine, its, targets, 1.0, 0.0, None)
    grad = kernels.grad(mine, targets, *stats, g, g, 1.0, 0.0, None, torch.empty_like(mine))
    found = {f"output {index} with kl": each.isnan().tolist() for index, each in enumerate(with_kl)}
    return found | {
        "entropy": stats[1].isnan().tolist(),
        "logprob": stats[0].isnan().tolist(),
        "gradient": [bool(row.isnan().all()) for row in grad],
    }


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, Any] = {
        kind: {name: compare(dtype) for name, compare in comparisons(ranks).items()} for kind, dtype in DTYPES.items()
    }
    found["certain"], found["bf16"] = certain_digits(ranks), bf16_errors(ranks)
    found["small and large"] = sum_of_small_and_large(ranks)
    found["outside"] = outside(ranks)
    found["collectives"], found["refusals"] = collectives(ranks), refusals(ranks)
    dist.destroy_process_group()
    names = (Path(task).read_text() for task in glob.glob("/proc/self/task/*/comm"))
    found["threads"] = [name for name in names if "gloo" in name]
    (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
