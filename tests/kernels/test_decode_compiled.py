"""The compiled ops of a decode step: what the generated tests, of one thread, leave open."""

import _ctypes
import ctypes

import pytest
import torch
from hwgrpo_kernels import Shape, decode_compiled, default_registry
from hwgrpo_kernels.decode_compiled import decode_attention, rms_norm
from hwgrpo_kernels.decode_definitions import rotated

from tests.support.numbers.op_agreement import DTYPES, assert_agrees

BY_NAME = {op.name: op for op in default_registry.ops()}
ATTENTION = BY_NAME["decode_attention"]
LONG = Shape(11, 150, 32)
"""Prompts and responses of several tiles, whose last is not full; rows of a prompt that are no neighbours."""
PLACES = ("prompt_of", "prompt_length", "offset")
FLOATS = ("query", "key", "value", "cos", "sin", "prompts", "responses")


def inputs_of(dtype=torch.float32, shape=LONG, case="three", *, neighbours=False):
    inputs = ATTENTION.inputs(shape, dtype, "cpu", case, seed=4)
    if neighbours:
        order = inputs["prompt_of"].argsort(stable=True)
        inputs |= {name: inputs[name][order] for name in PLACES}
    return inputs


def bits(tensor):
    """Return integers, of which NaN equals itself."""
    return tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()])


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["one", "three", "eight"])
def test_rows_of_several_tiles_equal_the_definition(case, dtype, neighbours):
    for shape in (LONG, LONG._replace(V=80), LONG._replace(V=128)):
        assert_agrees(ATTENTION, decode_attention, inputs_of(dtype, shape, case, neighbours=neighbours), dtype)


@pytest.mark.parametrize("size", [1, 20, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_that_of_torch(dtype, size):
    draw = torch.Generator().manual_seed(5)
    rows = torch.randn(7, size + 3, generator=draw).to(dtype)[:, :size]  # a slice: rows lie apart
    weight = torch.rand(size, generator=draw).to(dtype) + 0.5
    exact = torch.nn.functional.rms_norm(rows.double(), (size,), weight.double(), 1e-5)
    found = rms_norm(rows, weight, 1e-5)
    assert found.dtype == dtype
    # rounded once; in fp32 and fp64 the sum, the factor and two products round, too
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps * 8, atol=0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    torch.testing.assert_close(rms_norm(rows, weight.to(wide), 1e-5), found, rtol=torch.finfo(dtype).eps * 8, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_appended_is_equal_bit_for_bit_and_nothing_else_is_written(dtype):
    found, expected = inputs_of(dtype), inputs_of(dtype)
    decode_attention(**found)
    ATTENTION.definition(**expected)
    at, row = found["length"] - 1, torch.arange(LONG.N)
    near = 0 if dtype.itemsize == 2 else 4 * torch.finfo(dtype).eps  # the products of a sum are not rounded
    torch.testing.assert_close(found["responses"], expected["responses"], rtol=near, atol=near, equal_nan=True)
    for each in (found["responses"], expected["responses"]):
        each[0, :, row, at] = 0
    assert torch.equal(bits(found["responses"]), bits(expected["responses"]))
    assert torch.equal(bits(found["prompts"]), bits(expected["prompts"]))


def test_scores_so_high_that_only_the_maximum_counts_and_equal_ones_are_weighed_right():
    inputs = inputs_of(torch.float32)
    inputs["scaling"] = 40.0
    assert_agrees(ATTENTION, decode_attention, inputs, torch.float32)
    inputs["query"] = torch.zeros_like(inputs["query"])
    assert_agrees(ATTENTION, decode_attention, inputs, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_queries_and_keys_are_rounded_after_their_rotation_and_nothing_else_before_the_output(dtype):
    inputs = inputs_of(dtype)
    for name in ("cos", "sin"):
        inputs[name].fill_(0.5)  # products are exact: the order of a rotation's operations does not matter
    half = torch.full((LONG.N, LONG.V), 0.5, dtype=dtype)
    wide = inputs_of(dtype) | {name: rotated(inputs[name], half, half) for name in ("query", "key")}
    wide = {name: each.float() if name in FLOATS else each for name, each in wide.items()}
    wide["cos"].fill_(1.0)
    wide["sin"].fill_(0.0)
    assert torch.equal(decode_attention(**inputs), decode_attention(**wide).to(dtype))


def test_neighbouring_rows_of_prompts_of_one_length_read_their_own():
    inputs = inputs_of()
    inputs["prompts"] = inputs["prompts"].nan_to_num(0.5)
    inputs["prompt_length"].fill_(100)
    assert_agrees(ATTENTION, decode_attention, inputs, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_with_nan_changes_no_other(dtype):
    clean, poisoned = (inputs_of(dtype, neighbours=True) for _ in range(2))
    for name in ("query", "key", "value"):
        poisoned[name][2] = torch.nan
    poisoned["responses"][:, :, 2] = torch.nan
    expected, found = decode_attention(**clean), decode_attention(**poisoned)
    assert found[2].isnan().all()
    others = torch.arange(LONG.N) != 2
    assert torch.equal(bits(found[others]), bits(expected[others]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_s_bits_depend_neither_on_threads_nor_on_the_rows_beside_it(dtype):
    results, norms = [], []
    rows = torch.randn(130, 1100, generator=torch.Generator().manual_seed(2)).to(dtype)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            inputs = inputs_of(dtype, LONG._replace(V=128), "eight", neighbours=True)  # enough for several threads
            results.append((decode_attention(**inputs), inputs["responses"]))
            norms.append(rms_norm(rows, rows[0], 1e-5))
    finally:
        torch.set_num_threads(1)
    for other, its_norm in zip(results[1:], norms[1:], strict=True):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results[0], other, strict=True))
        assert torch.equal(its_norm, norms[0])
    per_row = ("query", "key", "value", "offset", "prompt_of", "prompt_length", "length")
    for row in (0, 3, 10):
        inputs = inputs_of(dtype, LONG._replace(V=128), "eight", neighbours=True)
        alone = {name: inputs[name][row : row + 1] for name in per_row}
        alone["responses"] = inputs["responses"][:, :, row : row + 1].contiguous()
        assert torch.equal(decode_attention(**inputs | alone)[0], results[0][0][row])


def test_a_call_runs_in_the_pool_of_torch_s_own_runtime():
    """The runtime is the one whose number of threads torch sets, and its function calls another on all of them."""
    address = decode_compiled.parallel_function()
    assert address is not None, "torch's build for Linux has OpenMP"
    seen = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(seen.append)
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(address)
    run(ctypes.cast(function, ctypes.c_void_p), None, 3, 0)
    assert len(seen) == 3
    with open("/proc/self/maps") as maps:
        loaded = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libgomp" in line}
    assert len(loaded) == 1, "compiled functions load no second runtime"


def test_without_a_runtime_the_calling_thread_computes_all(monkeypatch, tmp_path):
    shared = LONG._replace(V=128), "eight"  # enough for several threads
    expected = decode_attention(**inputs_of(torch.float32, *shared))
    torch.set_num_threads(2)
    try:
        for library in (tmp_path / "none.so", ctypes.__file__, _ctypes.__file__):  # two are there, but no OpenMP
            monkeypatch.setattr(torch._C, "__file__", str(library))
            monkeypatch.setattr(decode_compiled, "parallel_function", decode_compiled.parallel_function.__wrapped__)
            assert decode_compiled.parallel_function() is None
            assert torch.equal(decode_attention(**inputs_of(torch.float32, *shared)), expected)
            monkeypatch.undo()
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("length", 0), ("length", 81), ("prompt_of", -1), ("prompt_of", 6)],
        *[("prompt_length", 0), ("prompt_length", 151), ("offset", 10**6), ("offset", -100)],
    ],
)
def test_a_place_out_of_range_is_an_error_and_nothing_is_written(name, value):
    inputs = inputs_of()
    inputs[name][5] = value
    before = inputs["responses"].clone()
    with pytest.raises(IndexError, match="out of range"):
        decode_attention(**inputs)
    assert torch.equal(bits(inputs["responses"]), bits(before))
