"""The Triton row kernels agree with the definitions in fp64, over what the ops declare and over every tile."""

import pytest
import torch
from hwgrpo_kernels.op import Shape
from hwgrpo_kernels.tiles import TILES

from tests.support.numbers.op_agreement import DTYPES, assert_agrees, in_fp64
from tests.support.numbers.row_cases import (
    DEVICE,
    GRAD,
    GRAD_KL,
    NARROW,
    PERSISTENT,
    ROW_OPS,
    STATS,
    STATS_KL,
    from_table,
    statistics,
    with_tile,
)

SHAPES = [pytest.param(op, shape, id=f"{op.name}-{shape.N}x{shape.V}") for op in ROW_OPS for shape in op.shapes]


FEW = ("plain", "softcap", "row_scale", "dead_row")


def cases():
    """(op, case, dtype, tile). Interpreted, fp16 differs from bf16 in a conversion, a persistent program in a loop."""
    on_device = DEVICE != "cpu"
    for op in ROW_OPS:
        for case in op.cases:
            for dtype in DTYPES:
                name = f"{op.name}-{case}-{str(dtype)[6:]}"
                if on_device or dtype != torch.float16 or case in FEW:
                    yield pytest.param(op, case, dtype, NARROW, id=f"{name}-row_per_program")
                if on_device or (dtype == torch.float32 and case in FEW):
                    yield pytest.param(op, case, dtype, PERSISTENT, id=f"{name}-persistent")


def tiles_of_the_table():
    """(op, tile, dtype), each once; warps change nothing here."""
    dtypes = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    for op in ROW_OPS:
        found = {
            (tile.lanes, tile.width, itemsize): tile
            for arch in TILES.values()
            for itemsize, tile in getattr(arch, op.name.removesuffix("_kl")).items()
        }
        for (lanes, width, itemsize), tile in found.items():
            yield pytest.param(op, tile, dtypes[itemsize], id=f"{op.name}-{lanes}x{width}-{8 * itemsize}bit")


@pytest.mark.parametrize("op,case,dtype,tile", list(cases()))
def test_kernel_equals_the_definition(op, case, dtype, tile):
    assert_agrees(op, with_tile(op, tile), op.inputs(Shape(3, 0, 517), dtype, DEVICE, case), dtype)


@pytest.mark.parametrize("op,shape", SHAPES)
def test_kernel_equals_the_definition_at_the_declared_sizes(op, shape):
    if DEVICE == "cpu":
        shape = shape._replace(N=min(shape.N, 5))  # one after another: more of them show no more
    assert_agrees(op, from_table(op), op.inputs(shape, torch.float32, DEVICE, "row_scale"), torch.float32)


@pytest.mark.parametrize("vocab", [1, 2, 3, 127, 128, 129, 256, 383])
@pytest.mark.parametrize("op", ROW_OPS, ids=lambda op: op.name)
def test_every_place_of_the_target_among_whole_blocks_and_tail_is_right(op, vocab):
    rows = min(vocab, 8)
    inputs = op.inputs(Shape(rows, 0, vocab), torch.float64, DEVICE, "plain")
    places = torch.linspace(0, vocab - 1, rows).long()  # first, last and between
    if op in (GRAD, GRAD_KL):  # their statistics belong to the targets
        inputs = inputs | statistics(op, inputs, places)
    assert_agrees(op, with_tile(op, NARROW), inputs | {"targets": places}, torch.float64)
    if op in (GRAD, GRAD_KL):  # in place, where what is done twice is wrong
        in_place = {"targets": places, "out": inputs["logits"]}
        assert_agrees(op, with_tile(op, NARROW), inputs | in_place, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_neither_side_can_draw_is_nothing_even_as_the_target(dtype):
    logits, ref_logits = (
        torch.randn(4, 517, generator=torch.Generator(DEVICE).manual_seed(3), dtype=dtype) for _ in "12"
    )
    targets = torch.tensor([0, 130, 511, 516])
    for each in (logits, ref_logits):
        each.scatter_(1, targets[:, None], -torch.inf)
        each[:, torch.arange(517) // NARROW.width % NARROW.lanes == 3] = -torch.inf  # a lane that sees nothing else
    inputs = {"logits": logits, "ref_logits": ref_logits, "targets": targets}
    mapping = {"scale": 1.4, "squash": 0.0, "row_scale": None}  # its product with the smallest number overflows
    assert_agrees(STATS_KL, with_tile(STATS_KL, NARROW), inputs | mapping, dtype)


def test_a_target_that_the_reference_cannot_draw_leaves_the_others_part_of_the_kl_finite():
    inputs = STATS_KL.inputs(Shape(4, 0, 517), torch.float32, DEVICE, "certain")
    inputs["ref_logits"].scatter_(1, inputs["targets"][:, None], -torch.inf)
    assert_agrees(STATS_KL, with_tile(STATS_KL, NARROW), inputs, torch.float32)
    found = dict(zip(STATS_KL.outputs, with_tile(STATS_KL, NARROW)(**inputs)))
    assert (found["kl"] == torch.inf).all()
    assert found["kl_others"].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("first", [slice(0, 128), slice(384, 516)], ids=["early", "late"])
def test_what_becomes_impossible_beside_a_larger_logit_leaves_nothing_of_a_reference_that_cannot_draw_it(first, dtype):
    logits, ref_logits = torch.full((2, 517), 900.0, dtype=dtype), torch.zeros(2, 517, dtype=dtype)
    logits[0, first] = logits[0, 516] = 0.0  # e^-900 is 0 in fp64 too; rows begin with their target, which is as small
    ref_logits[:, first] = -torch.inf  # the second row can draw what its reference cannot
    inputs = {"logits": logits, "ref_logits": ref_logits, "targets": torch.tensor([516, 516])}
    mapping = {"scale": 1.0, "squash": 0.0, "row_scale": None}
    assert_agrees(STATS_KL, with_tile(STATS_KL, NARROW), inputs | mapping, dtype)
    found = dict(zip(STATS_KL.outputs, with_tile(STATS_KL, NARROW)(**inputs, **mapping)))
    assert 0 < found["kl"][0] < 0.01
    assert found["kl"][1] == torch.inf


@pytest.mark.parametrize("per_processor", [0, 1])
@pytest.mark.parametrize("op,tile,dtype", list(tiles_of_the_table()))
def test_every_tile_of_the_table_gives_the_same_answer(op, tile, dtype, per_processor):
    inputs = op.inputs(Shape(3, 0, 2 * tile.block + 13), dtype, DEVICE, "plain")
    assert_agrees(op, with_tile(op, tile._replace(per_processor=per_processor)), inputs, dtype)


@pytest.mark.parametrize(
    "op,case", [pytest.param(op, case, id=f"{op.name}-{case}") for op in (GRAD, GRAD_KL) for case in op.cases]
)
def test_bf16_gradients_are_within_one_unit_in_the_last_place(op, case):
    inputs = op.inputs(Shape(5, 0, 517), torch.bfloat16, DEVICE, case)
    exact = in_fp64(inputs)
    true = op.definition(**exact).clone()
    out = with_tile(op, NARROW)(**inputs).cpu()
    units = (place(out) - place(true.bfloat16())).abs()
    # Terms that cancel leave what fp32 lost of them: what the result moves by when the logits move by that much.
    lost = sum((op.definition(**exact | moved) - true).abs() for moved in moved_by(exact, 2**-20))
    units[(out.double() - true).abs() <= lost] = 0
    assert units.max() <= 1, f"{units.max()} units at {true.flatten()[units.argmax()]}"


def moved_by(inputs, share):
    """Yield the logits, and those of a reference, with neighbours moved apart by a share of their size."""
    for name in {"logits", "ref_logits"} & inputs.keys():
        signs = 1 - 2 * (torch.arange(inputs[name].shape[1], device="cpu") % 2)
        yield {name: inputs[name] * (1 + share * signs), "out": torch.empty_like(inputs["out"])}


def place(values):
    """Number the bf16 values in order, so that neighbours differ by one."""
    bits = values.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_an_almost_certain_target_keeps_its_digits(dtype):
    inputs = GRAD.inputs(Shape(5, 0, 517), dtype, DEVICE, "certain")
    inputs["grad_entropy"] = inputs["entropy"] = None
    inputs["logprob"] = -torch.tensor([1e-3, 1e-5, 1e-7, 1e-9, 1e-12])
    out = with_tile(GRAD, NARROW)(**inputs).gather(1, inputs["targets"][:, None])[:, 0]
    true = -torch.expm1(inputs["logprob"].double()) * inputs["grad_logprob"]
    torch.testing.assert_close(out.double(), true, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=0)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("op", [STATS, STATS_KL], ids=lambda op: op.name)
def test_the_logprob_of_an_almost_certain_target_keeps_its_digits(op, dtype, tolerance):
    inputs = op.inputs(Shape(3, 0, 517), dtype, DEVICE, "certain")
    found = dict(zip(op.outputs, with_tile(op, NARROW)(**inputs)))
    for side, prefix in (("logits", ""), ("ref_logits", "ref_"))[: 1 + (op is STATS_KL)]:
        logits, targets = inputs[side].double(), inputs["targets"][:, None]
        others = logits.scatter(1, targets, -torch.inf).logsumexp(1)
        true = (others - logits.gather(1, targets)[:, 0]).exp().log1p()
        assert (true < 1e-5).any()
        torch.testing.assert_close(-found[f"{prefix}logprob"].double(), true, rtol=tolerance, atol=0)
