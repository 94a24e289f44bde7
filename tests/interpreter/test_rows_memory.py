"""The Triton row kernels read and write their rows and nothing else, however these lie in memory."""

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import pytest
import torch
from hwgrpo_kernels import rows_triton
from hwgrpo_kernels.op import Shape

from tests.support.numbers.op_agreement import assert_agrees
from tests.support.numbers.row_cases import (
    DEVICE,
    GRAD,
    GRAD_KL,
    NARROW,
    PERSISTENT,
    ROW_OPS,
    STATS,
    STATS_KL,
    assert_same,
    from_table,
    with_tile,
)

SHAPE = Shape(5, 0, 517)
GUARDED = Shape(3, 0, 517)  # the first row, the last and one between
TILES = pytest.mark.parametrize("tile", [NARROW, PERSISTENT], ids=["row_per_program", "persistent"])
# (first column, row length): rows on 16-byte boundaries, and rows that are not.
STATS_OPS = pytest.mark.parametrize("op", [STATS, STATS_KL], ids=lambda op: op.name)
GRAD_OPS = pytest.mark.parametrize("op", [GRAD, GRAD_KL], ids=lambda op: op.name)
LAYOUTS = pytest.mark.parametrize("first,length", [(16, 560), (3, 541)], ids=["aligned", "unaligned"])


def guarded(matrix, first, length):
    """Copy [N,V] into a larger buffer of NaN; return the copy and the buffer."""
    buffer = torch.full((matrix.shape[0] + 2, length), torch.nan, dtype=matrix.dtype)
    inner = buffer[1:-1, first : first + matrix.shape[1]]
    inner.copy_(matrix)
    return inner, buffer


def guards_hold(inner, buffer):
    return int(buffer.isnan().sum()) == buffer.numel() - inner.numel()


def guarded_reference(inputs):
    """The reference logits of a call, if it has any, as rows of another layout than the policy's."""
    return {name: guarded(inputs[name], 5, 600)[0] for name in ("ref_logits",) if name in inputs}


@TILES
@LAYOUTS
@STATS_OPS
@pytest.mark.parametrize("case", ["plain", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_of_guarded_rows_are_those_of_rows_alone(op, case, dtype, first, length, tile):
    inputs = op.inputs(GUARDED, dtype, DEVICE, case)
    alone = with_tile(op, tile)(**inputs)
    inner, buffer = guarded(inputs["logits"], first, length)
    among = with_tile(op, tile)(**inputs | {"logits": inner} | guarded_reference(inputs))
    assert_same(among, alone)
    assert guards_hold(inner, buffer)


@TILES
@LAYOUTS
@GRAD_OPS
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_guarded_rows_is_that_of_rows_alone_and_writes_no_guard(
    op, dtype, in_place, first, length, tile
):
    inputs = op.inputs(GUARDED, dtype, DEVICE, "plain")
    alone = with_tile(op, tile)(**inputs).clone()
    inner, buffer = guarded(inputs["logits"], first, length)
    out, out_buffer = (inner, buffer) if in_place else guarded(inputs["out"].zero_(), 5, 600)
    made = with_tile(op, tile)(**inputs | {"logits": inner, "out": out} | guarded_reference(inputs))
    assert made.data_ptr() == out.data_ptr()
    assert_same([out], [alone])
    assert guards_hold(out, out_buffer)
    assert guards_hold(inner, buffer)


@GRAD_OPS
@pytest.mark.parametrize("case", ["plain", "scaled", "softcap", "row_scale", "dead_row"])
def test_the_gradient_in_place_equals_the_gradient_out_of_place(op, case):
    inputs = op.inputs(SHAPE, torch.bfloat16, DEVICE, case)
    apart = with_tile(op, NARROW)(**inputs).clone()
    assert torch.equal(with_tile(op, NARROW)(**inputs | {"out": inputs["logits"]}), apart)


@pytest.mark.parametrize("op", ROW_OPS, ids=lambda op: op.name)
def test_transposed_logits_expanded_gradients_and_strided_vectors_are_read_right(op):
    inputs = op.inputs(SHAPE, torch.float32, DEVICE, "row_scale")
    for name in {"logits", "ref_logits"} & inputs.keys():
        inputs[name] = inputs[name].T.contiguous().T
    inputs["row_scale"] = torch.stack([inputs["row_scale"], torch.zeros(SHAPE.N)], 1)[:, 0]
    if "out" in inputs:
        inputs["grad_logprob"] = torch.ones(()).expand(SHAPE.N)
        inputs["out"] = torch.empty(SHAPE.V, SHAPE.N).T
    assert_agrees(op, with_tile(op, NARROW), inputs, torch.float32)


def test_row_grad_writes_an_out_of_another_dtype():
    inputs = GRAD.inputs(SHAPE, torch.bfloat16, DEVICE, "plain")
    wide = with_tile(GRAD, NARROW)(**inputs | {"out": torch.empty(SHAPE.N, SHAPE.V)})
    assert wide.dtype == torch.float32
    assert_same([wide.bfloat16()], [with_tile(GRAD, NARROW)(**inputs)])


@pytest.mark.parametrize("op", [GRAD, GRAD_KL], ids=lambda op: op.name)
def test_a_gradient_of_fp32_logits_is_rounded_once_where_it_is_written_in_bf16(op):
    inputs = op.inputs(SHAPE, torch.float32, DEVICE, "plain")
    exact = from_table(op)(**inputs).clone()
    narrow = from_table(op)(**inputs | {"out": torch.empty(SHAPE.N, SHAPE.V, dtype=torch.bfloat16)})
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), exact, rtol=2**-8, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_int32_targets_are_targets(dtype):
    inputs = STATS.inputs(SHAPE, dtype, DEVICE, "plain")
    narrow = inputs | {"targets": inputs["targets"].int()}
    assert all(torch.equal(a, b) for a, b in zip(from_table(STATS)(**inputs), from_table(STATS)(**narrow)))


@pytest.mark.parametrize("target", [-100, 517, 600, 2**33])
def test_a_target_out_of_range_makes_its_own_row_nan_and_reads_nothing_outside(target):
    inputs = STATS.inputs(SHAPE, torch.float32, DEVICE, "plain")
    right = with_tile(STATS, NARROW)(**inputs)
    inputs["targets"][2] = target
    stats = with_tile(STATS, NARROW)(**inputs)
    others = torch.arange(SHAPE.N) != 2
    assert all(torch.equal(a[others], b[others]) for a, b in zip(right, stats))
    assert stats[0][2].isnan()
    logits, targets, *_ = inputs.values()
    g = torch.ones(SHAPE.N)
    grad = with_tile(GRAD, NARROW)(
        logits=logits, targets=targets, logprob=stats[0], entropy=None, row_max=stats[2], log_sum=stats[3],
        grad_logprob=g, grad_entropy=None, scale=1.0, squash=0.0, row_scale=None, out=torch.empty_like(logits),
    )  # fmt: skip
    assert grad[2].isnan().all()
    assert grad[others].isfinite().all()


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("column", [0, 300, 516])  # in a whole block, in another, in the tail
def test_a_nan_logit_shows_in_the_statistics_of_its_row(column, with_entropy):
    inputs = STATS.inputs(SHAPE, torch.float32, DEVICE, "plain") | {"with_entropy": with_entropy}
    inputs["targets"].fill_(7)
    inputs["logits"][3, column] = torch.nan
    stats = with_tile(STATS, NARROW)(**inputs)
    for each in stats[:2] if with_entropy else stats[:1]:
        assert each.isnan().tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("column", [0, 300, 516])
@pytest.mark.parametrize("side", ["logits", "ref_logits"])
def test_a_nan_logit_on_either_side_shows_in_the_kl_of_its_row_and_in_its_gradient(side, column):
    inputs = STATS_KL.inputs(SHAPE, torch.float32, DEVICE, "plain")
    inputs["targets"].fill_(7)
    inputs[side][3, column] = torch.nan
    found = dict(zip(STATS_KL.outputs, with_tile(STATS_KL, NARROW)(**inputs)))
    assert found["kl"].isnan().tolist() == [False, False, False, True, False]
    assert found["ref_logprob"].isnan().tolist() == [False, False, False, side == "ref_logits", False]
    inputs = GRAD_KL.inputs(SHAPE, torch.float32, DEVICE, "plain")
    inputs[side][3, column] = torch.nan
    assert with_tile(GRAD_KL, NARROW)(**inputs).isnan().nonzero().tolist() == [[3, column]]


@pytest.mark.parametrize("target", [-100, 517, 2**33])
def test_a_target_out_of_range_makes_the_kl_of_its_row_nan_too(target):
    inputs = STATS_KL.inputs(SHAPE, torch.float32, DEVICE, "plain")
    inputs["targets"][2] = target
    found = dict(zip(STATS_KL.outputs, with_tile(STATS_KL, NARROW)(**inputs)))
    for name in ("logprob", "kl", "ref_logprob"):
        assert found[name].isnan().tolist() == [False, False, True, False, False], name


def test_rows_beyond_2_31_elements_are_found():
    vocab, stride = 517, 2**30 + 64  # the third row begins past element 2**31
    pages = mmap(-1, 2 * (2 * stride + 2 * 1024), flags=MAP_PRIVATE | MAP_ANONYMOUS)  # 4 GiB, of which some are touched
    memory = torch.frombuffer(pages, dtype=torch.bfloat16)
    far, far_ref = (memory.as_strided((3, vocab), (stride, 1), first) for first in (0, 1024))
    for op in ROW_OPS:
        for tile in (NARROW, PERSISTENT):
            inputs = op.inputs(Shape(3, 0, vocab), torch.bfloat16, "cpu")
            inputs["logits"] = far.copy_(inputs["logits"])
            if "ref_logits" in inputs:
                inputs["ref_logits"] = far_ref.copy_(inputs["ref_logits"])
            if "out" in inputs:
                inputs["out"] = far
            assert_agrees(op, with_tile(op, tile), inputs, torch.bfloat16)


@pytest.mark.parametrize(
    "dtype,stride,known",
    [(torch.bfloat16, 64, (8, 8)), (torch.bfloat16, 517, (1, 517)), (torch.float32, 516, (4, 129))],
)
def test_rows_are_known_to_be_aligned_where_16_bytes_divide_their_stride(dtype, stride, known):
    assert rows_triton.aligned_stride(torch.empty(3, stride, dtype=dtype)) == known
