"""A vocabulary in parts: statistics and gradients of the parts, put together, are those of the whole."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hwgrpo_kernels import definitions, linear_logprob, linear_token_loss, rows_torch
from hwgrpo_kernels.logit_map import LogitMap
from hwgrpo_kernels.op import Shape
from hwgrpo_kernels.ops import row_grad_inputs, row_inputs
from hwgrpo_kernels.streaming import RowKernels, RowStats
from hwgrpo_kernels.vocab_parallel import VocabShard, combine_shards

from tests.kernels.token_loss_cases import HEAD, ppo, problem, relative
from tests.support.numbers.op_agreement import in_fp64
from tests.support.numbers.rounding import assert_values_close

CPU = torch.device("cpu")
CASES = ["plain", "scaled", "softcap", "row_scale", "offset_up", "offset_down", "flat", "masked_vocab", "dead_row"]
CASES += ["certain"]
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}
LOCAL = RowKernels(rows_torch.row_stats, rows_torch.row_grad)


def cut(vocab: int, seed: int) -> list[int]:
    """Sizes of 2 to 6 parts, the smallest of one entry."""
    generator = torch.Generator().manual_seed(seed)
    inner = 1 + torch.randperm(vocab - 1, generator=generator)[: 1 + seed % 5]
    bounds = [0, 1, *sorted(set(inner.tolist()) - {1}), vocab]
    return [b - a for a, b in pairwise(bounds)]


def pieces(inputs, sizes) -> list[RowStats]:
    """What each rank's `row_stats` says of its columns; a target elsewhere counts as the nearest column."""
    parts, first = [], 0
    for size in sizes:
        mine = {
            "logits": inputs["logits"][:, first : first + size],
            "targets": (inputs["targets"] - first).clamp(0, size - 1),
        }
        parts.append(RowStats(*rows_torch.row_stats(**{**inputs, **mine})))
        first += size
    return parts


def owners(targets, sizes):
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[targets]


def together(inputs, sizes) -> RowStats:
    mapping = LogitMap(inputs["scale"], inputs["squash"], inputs["row_scale"])
    return combine_shards(pieces(inputs, sizes), owners(inputs["targets"], sizes), mapping)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("case", CASES)
def test_statistics_of_the_parts_make_those_of_the_row(case, dtype):
    for seed in range(10):
        inputs = row_inputs(Shape(N=40, H=1, V=97), dtype, "cpu", case, seed)
        whole = definitions.row_stats(**{**inputs, "logits": inputs["logits"].double()})
        got = together(inputs, cut(97, seed))
        assert len(got.entropy) == len(whole[1])
        for name, value, true in zip(("logprob", "entropy", "row_max", "log_sum"), got, whole):
            true = true.clamp(min=torch.finfo(dtype).min) if name == "row_max" else true
            torch.testing.assert_close(value.double(), true, rtol=EXACT[dtype], atol=EXACT[dtype], msg=f"{name} {seed}")


@pytest.mark.parametrize("rank_of_target", [0, 1, 2])
def test_a_nearly_certain_target_keeps_its_digits_whichever_rank_has_it(rank_of_target):
    sizes, target = [100, 50, 150], [7, 101, 299][rank_of_target]
    logits = torch.zeros(5, 300)
    logits[:, target] = torch.tensor([5.0, 12.0, 20.0, 30.0, 60.0])
    inputs = {
        "logits": logits,
        "targets": torch.full((5,), target),
        "scale": 1.0,
        "squash": 0.0,
        "row_scale": None,
        "with_entropy": True,
    }
    got = together(inputs, sizes)
    others = 299 * torch.exp(-logits[:, target].double())
    torch.testing.assert_close(got.logprob.double(), -torch.log1p(others), rtol=1e-5, atol=0)
    probability = others / (1 + others)
    entropy = torch.log1p(others) + probability * logits[:, target].double()
    torch.testing.assert_close(got.entropy.double(), entropy, rtol=1e-5, atol=0)


def test_a_target_that_cannot_be_drawn_has_logprob_minus_infinity_and_nothing_else_suffers():
    inputs = row_inputs(Shape(N=6, H=1, V=30), torch.float64, "cpu")
    inputs["targets"] = torch.tensor([0, 5, 9, 10, 25, 29])
    inputs["logits"][:, :10] = -torch.inf
    whole, got = definitions.row_stats(**inputs), together(inputs, [10, 15, 5])
    assert got.logprob[:3].tolist() == [-torch.inf] * 3
    for value, true in zip(got, whole):
        torch.testing.assert_close(value, true, rtol=1e-12, atol=1e-12)


def gradient_in_parts(inputs, sizes) -> torch.Tensor:
    """Each rank's gradient of its own columns, from the statistics of whole rows; in place, as the driver does."""
    names = ("logprob", "entropy", "row_max", "log_sum", "grad_logprob", "grad_entropy", "scale", "squash", "row_scale")
    parts = []
    for rank, size in enumerate(sizes):
        first = sum(sizes[:rank])
        # a group that no collective is called on
        shard = VocabShard(sizes, rank, object(), CPU)  # pyright: ignore[reportArgumentType]
        logits = inputs["logits"][:, first : first + size].clone()
        parts.append(shard.kernels(LOCAL).grad(logits, inputs["targets"], *(inputs[name] for name in names), logits))
        assert parts[-1] is logits
    return torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", [*EXACT, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_the_parts_are_that_of_the_row(case, dtype):
    row_grad = rows_torch.row_grad if case == "certain" else definitions.row_grad  # autograd loses the digits of 1 - p
    for seed in range(5):
        inputs = row_grad_inputs(Shape(N=40, H=1, V=97), dtype, "cpu", case, seed)
        truth = row_grad(**in_fp64(inputs))
        got = gradient_in_parts(inputs, cut(97, seed))
        assert relative(got, truth) < EXACT.get(dtype, 2**-8)
        dead = (inputs["logits"] == -torch.inf).all(1)
        assert int(dead.sum()) == (8 if case == "dead_row" else 0)
        assert got[dead].count_nonzero() == 0


def test_every_column_of_a_rank_without_the_target_is_as_exact_as_the_others():
    """A one-hot term left at some column would be far off; one put right by subtraction would be so in bf16."""
    inputs = row_grad_inputs(Shape(N=40, H=1, V=97), torch.bfloat16, "cpu")
    inputs["targets"] = torch.full((40,), 96)
    inputs["grad_entropy"] = inputs["grad_entropy"] * 1e-3
    truth = definitions.row_grad(**in_fp64(inputs))
    whole = rows_torch.row_grad(**{**inputs, "out": inputs["out"].clone()})
    got = gradient_in_parts(inputs, [48, 40, 9])
    for column in (0, 47, 48, 87):
        assert relative(got[:, column], truth[:, column]) <= 2**-8
        assert torch.equal(got[:, column], whole[:, column])


@pytest.fixture
def alone():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_of_one_rank_gives_what_no_group_gives(alone):
    p = problem(n=30, h=8, v=41)
    plain = linear_token_loss(p.hidden, p.weight, p.targets, ppo, rows=p.rows, chunk_rows=16)
    grouped = linear_token_loss(p.hidden, p.weight, p.targets, ppo, rows=p.rows, chunk_rows=16, vocab_group=alone)
    assert_values_close(grouped.loss, plain.loss, HEAD)
    assert_values_close(grouped.logprob_N, plain.logprob_N, HEAD)


def test_inside_a_compiled_region_a_vocab_group_is_refused(alone):
    p = problem(n=12, h=6, v=20)

    def region(hidden):
        return linear_logprob(hidden, p.weight, p.targets, vocab_group=alone).logprob

    with pytest.raises(Exception, match="linear_logprob with a vocab_group is eager"):
        torch.compile(region, backend="eager", fullgraph=True)(p.hidden)


def test_differentiating_a_gradient_twice_is_refused(alone):
    p = problem(n=12, h=6, v=20)
    logprob = linear_logprob(p.hidden, p.weight, p.targets, vocab_group=alone).logprob
    (grad,) = torch.autograd.grad(logprob.square().sum(), p.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
