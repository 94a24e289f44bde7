"""Cases that compare a head sharded over a process group with the full head on this rank."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from hwgrpo_kernels import ReferenceHead, linear_logprob, linear_token_loss
from torch import Tensor

from tests.kernels.token_loss_cases import centred, full_kl, gspo, ppo, problem, with_reference

N, H, V = 48, 12, 101
CU = torch.tensor([0, 9, 9, 20, 41, 48])
MASK = torch.arange(N) % 3 != 1
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def cuts(ranks: int, even: bool = False) -> list[int]:
    """First row of the head on each rank, and V at the end; uneven parts include one of a single row."""
    if even:
        return [V * rank // ranks for rank in range(ranks)] + [V]
    return [0, 60, V] if ranks == 2 else [0, 1, 57, 80, V]


def leaf(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone().requires_grad_(tensor.requires_grad)


def digest(*tensors: Tensor | None) -> str:
    """A fingerprint of the bits of some tensors."""
    parts = [each.detach().double().numpy().tobytes() for each in tensors if each is not None]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def largest_error(got: Tensor | None, true: Tensor | None) -> float:
    """|a - b| / (1 + |b|), the largest; infinity where one is missing, of another shape, or not finite alone."""
    if got is None or true is None:
        return 0.0 if got is true else torch.inf
    if got.shape != true.shape or not torch.equal(got.isfinite(), true.isfinite()):
        return torch.inf
    finite = true.isfinite()
    a, b = got.detach().double()[finite], true.detach().double()[finite]
    return ((a - b).abs() / (1 + b.abs())).max().item() if b.numel() else 0.0


def relative(got: Tensor | None, true: Tensor | None) -> float:
    """||a - b|| / ||b||."""
    if got is None or true is None or got.shape != true.shape:
        return 0.0 if got is true else torch.inf
    return ((got.double() - true.double()).norm() / true.double().norm().clamp(min=1e-30)).item()


def reference_of(p: Any, rows: slice) -> ReferenceHead | None:
    """The reference of a problem, with some rows of its head."""
    if p.reference is None:
        return None
    hidden, weight, bias = p.reference
    return ReferenceHead(hidden, weight[rows], None if bias is None else bias[rows])


def part_of(p: Any, first: int, stop: int) -> tuple[Tensor, Tensor | None]:
    weight = p.weight.detach()[first:stop].clone().requires_grad_(p.weight.requires_grad)
    return weight, None if p.bias is None else p.bias.detach()[first:stop].clone().requires_grad_(p.bias.requires_grad)


def compare_loss(p: Any, loss_fn: Any, bounds: list[int], columns: int = 0, **arguments: Any) -> dict[str, Any]:
    """linear_token_loss with the head sharded and full: errors, and a fingerprint of what must be equal on all ranks.

    `columns` says how many of the first hidden units are left out of the comparison of gradients.
    """
    rank = dist.get_rank()
    first, stop = bounds[rank : rank + 2]

    def run(weight: Tensor, bias: Tensor | None, group: Any) -> tuple[Any, list[Tensor | None]]:
        hidden = leaf(p.hidden)
        assert hidden is not None
        reference = reference_of(p, slice(None) if group is None else slice(first, stop))
        result = linear_token_loss(
            hidden, weight, p.targets, loss_fn, rows=p.rows, bias=bias, vocab_group=group, reference=reference,
            **arguments,
        )  # fmt: skip
        if result.loss.requires_grad:
            result.loss.backward()
        return result, [None if each is None else each.grad for each in (hidden, weight, bias)]

    weight, bias = leaf(p.weight), leaf(p.bias)
    assert weight is not None
    whole, whole_grads = run(weight, bias, None)
    mine, grads = run(*part_of(p, first, stop), dist.group.WORLD)
    shares = [whole_grads[0], *(None if each is None else each[first:stop] for each in whole_grads[1:])]
    shown = [[each if each is None or each.dim() == 1 else each[:, columns:] for each in of] for of in (grads, shares)]
    errors = {name: relative(*pair) for name, *pair in zip(("hidden", "weight", "bias"), *shown)}
    errors["loss"] = largest_error(mine.loss, whole.loss)
    errors["logprob"] = largest_error(mine.logprob_N, whole.logprob_N)
    errors["entropy"] = largest_error(mine.entropy_N, whole.entropy_N)
    errors["kl"] = largest_error(mine.kl_N, whole.kl_N)
    assert mine.sums.keys() == whole.sums.keys()
    errors |= {f"sum of {name}": largest_error(mine.sums[name], whole.sums[name]) for name in whole.sums}
    same = digest(mine.loss, mine.logprob_N, mine.entropy_N, mine.kl_N, grads[0], *mine.sums.values())
    return {"errors": errors, "same": same}


def compare_logprob(p: Any, bounds: list[int], use: str, **arguments: Any) -> dict[str, Any]:
    """linear_logprob with the head sharded and full; `use` lists the outputs that the loss uses."""
    rank = dist.get_rank()
    first, stop = bounds[rank : rank + 2]
    weights = torch.randn(2, p.hidden.shape[0], generator=torch.Generator().manual_seed(5)).to(p.hidden.dtype)

    def run(weight: Tensor, bias: Tensor | None, group: Any) -> tuple[Any, list[Tensor | None]]:
        hidden = leaf(p.hidden)
        assert hidden is not None
        arguments_of = {"bias": bias, "with_entropy": "entropy" in use, "vocab_group": group, **arguments}
        got = linear_logprob(hidden, weight, p.targets, **arguments_of)
        total = weights.new_zeros(())
        if "logprob" in use:
            total = total + (got.logprob * weights[0]).sum()
        if got.entropy is not None:
            total = total + (got.entropy * weights[1]).sum()
        if total.requires_grad:
            total.backward()
        return got, [None if each is None else each.grad for each in (hidden, weight, bias)]

    weight, bias = leaf(p.weight), leaf(p.bias)
    assert weight is not None
    whole, whole_grads = run(weight, bias, None)
    mine, grads = run(*part_of(p, first, stop), dist.group.WORLD)
    shares = [whole_grads[0], *(None if each is None else each[first:stop] for each in whole_grads[1:])]
    errors = {name: relative(*pair) for name, *pair in zip(("hidden", "weight", "bias"), grads, shares)}
    errors |= {name: largest_error(getattr(mine, name), getattr(whole, name)) for name in ("logprob", "entropy")}
    return {"errors": errors, "same": digest(mine.logprob, mine.entropy, grads[0])}


def make(dtype: torch.dtype, change: Callable[[Any], None] | None = None, **arguments: Any) -> Any:
    p = problem(**{"n": N, "h": H, "v": V, "dtype": dtype, **arguments})
    if dtype == torch.float64:
        p.rows = {name: each.double() for name, each in p.rows.items()}
    with torch.no_grad():
        if change is not None:
            change(p)
    return p


def beside(p: Any) -> None:
    """Give a problem a reference of another width with a bias, in its dtype."""
    with_reference(p, h=7, bias=True)


def near_certain(p: Any) -> None:
    """Every target 20 nats above the next: rows of the head are the binary digits of their number, as +-1."""
    p.weight.copy_((torch.arange(V)[:, None] >> torch.arange(H) & 1) * 2 - 1)
    p.hidden.copy_(10 * p.weight[p.targets])
    p.rows["old"].zero_()


def dead_on_rank_one(first: int, stop: int) -> Callable[[Any], None]:
    """Make every other row of logits -inf on one rank, and leave that rank without targets."""

    def change(p: Any) -> None:
        huge = 1e30 if p.hidden.dtype == torch.float32 else 1e200
        p.hidden[:, 0] = 0.0
        p.hidden[::2, 0] = huge
        p.weight[:, 0] = 0.0
        p.weight[first:stop, 0] = -huge
        p.targets[(p.targets >= first) & (p.targets < stop)] = stop % V

    return change


def comparisons(ranks: int) -> dict[str, Callable[[torch.dtype], dict[str, Any]]]:
    """Everything compared, by name, to be called with a dtype."""
    uneven, even = cuts(ranks), cuts(ranks, even=True)
    per_row = torch.rand(N, generator=torch.Generator().manual_seed(9)) + 0.5
    mapped = {"softcap": 3.0, "logit_scale": 0.8, "temperature": per_row, "row_mask": MASK}
    dead = dead_on_rank_one(*uneven[1:3])  # by hidden unit 0, where squares overflow

    def dead_beside(p: Any) -> None:
        dead(p)
        beside(p)

    def certain_beside(p: Any) -> None:
        near_certain(p)
        beside(p)

    def no_targets_on_the_last(p: Any) -> None:
        p.targets %= uneven[-2]

    def loss(fn: Any, bounds: list[int] = uneven, change: Any = None, of: Any = None, **arguments: Any) -> Any:
        return lambda dtype: compare_loss(make(dtype, change, **(of or {})), fn, bounds, **arguments)

    def logprob(use: str, bounds: list[int] = uneven, of: Any = None, **arguments: Any) -> Any:
        return lambda dtype: compare_logprob(make(dtype, **(of or {})), bounds, use, **arguments)

    # By default a chunk has fewer rows the larger the vocabulary: here two chunks, but one for parts of a single row.
    lopsided = [0, *range(40_000, 40_000 + ranks)]
    large = {"n": 130, "h": 2, "v": lopsided[-1]}

    return {
        "one chunk": loss(ppo),
        "even parts": loss(ppo, even, chunk_rows=20),
        "chunks": loss(ppo, chunk_rows=7, temperature=0.7),
        "bias, softcap, temperature per row, mask": loss(ppo, of={"bias": True}, chunk_rows=9, **mapped),
        "default chunks": loss(ppo, lopsided, of=large),
        "frozen head": loss(ppo, of={"bias": True, "frozen": ("weight", "bias")}, chunk_rows=20),
        "frozen hidden": loss(ppo, of={"frozen": ("hidden",)}, chunk_rows=20),
        "nothing trained": loss(ppo, of={"frozen": ("hidden", "weight")}, chunk_rows=20),
        "sequences": loss(gspo, scope="sequence", cu_seqlens=CU, chunk_rows=24),
        "long sequences, mask": loss(gspo, scope="sequence", cu_seqlens=CU, chunk_rows=10, row_mask=MASK),
        "batch": loss(centred, of={"bias": True}, scope="batch", chunk_rows=10),
        "no rows": loss(ppo, of={"n": 0, "bias": True}),
        "no rows, batch": loss(centred, of={"n": 0}, scope="batch"),
        "all masked": loss(ppo, row_mask=torch.zeros(N, dtype=torch.bool)),
        "one row": loss(ppo, of={"n": 1}),
        "a part without targets": loss(ppo, change=no_targets_on_the_last, chunk_rows=20),
        "dead on one rank": loss(ppo, change=dead, columns=1, chunk_rows=20),
        "nearly certain": loss(ppo, change=near_certain, chunk_rows=20),
        "reference": loss(full_kl, change=beside, chunk_rows=7, temperature=0.7),
        "reference, batch": loss(full_kl, change=beside, scope="batch", chunk_rows=10),
        "reference, bias, softcap, mask": loss(full_kl, change=beside, of={"bias": True}, chunk_rows=9, **mapped),
        "reference, dead on one rank": loss(full_kl, change=dead_beside, columns=1, chunk_rows=20),
        "reference, nearly certain": loss(full_kl, change=certain_beside, chunk_rows=20),
        "reference, no rows": loss(full_kl, change=beside, of={"n": 0}),
        "logprob": logprob("logprob", chunk_rows=20),
        "logprob and entropy": logprob("logprob entropy", of={"bias": True}, softcap=4.0, temperature=per_row),
        "entropy alone": logprob("entropy", chunk_rows=20),
        "logprob, frozen head": logprob("logprob", of={"frozen": ("weight",)}),
        "logprob, no gradient": logprob("logprob entropy", of={"frozen": ("weight", "hidden")}, chunk_rows=20),
        "logprob, default chunks": logprob("logprob", lopsided, of=large),
        "logprob, no rows": logprob("logprob entropy", of={"n": 0}),
    }
