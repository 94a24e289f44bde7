"""Generated from the op declarations: every implementation that can run here agrees with the definition in fp64."""

import pytest
import torch
from hwgrpo_kernels import Key, Shape, default_registry, rows_torch
from torch import Tensor

from tests.support.numbers.op_agreement import DTYPES, assert_agrees, runnable


@pytest.mark.parametrize("op,implementation,dtype,case,shape", list(runnable("cpu")))
def test_implementation_equals_the_definition(op, implementation, dtype, case, shape):
    inputs = op.inputs(shape, dtype, "cpu", case)
    kept = {
        name: value.clone()
        for name, value in inputs.items()
        if isinstance(value, Tensor) and name not in ("out", *op.written)
    }
    assert_agrees(op, implementation.function(), inputs, dtype)
    for name, value in kept.items():
        torch.testing.assert_close(inputs[name], value, rtol=0, atol=0, equal_nan=True, msg=f"{name} was overwritten")


def _row_cases():
    return [(op, case) for op in default_registry.ops() if op.name in ("row_stats", "row_grad") for case in op.cases]


@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize(("op", "case"), _row_cases(), ids=lambda value: getattr(value, "name", value))
def test_rows_that_torch_takes_block_by_block_equal_the_definition(op, case, rows, monkeypatch):
    shape = op.shapes[0]
    monkeypatch.setattr(rows_torch, "_BLOCK_BYTES", 4 * shape.V * rows)
    blocks = []
    real = rows_torch._distances
    monkeypatch.setattr(rows_torch, "_distances", lambda *words: blocks.append(words[0].shape[0]) or real(*words))
    assert_agrees(op, getattr(rows_torch, op.name), op.inputs(shape, torch.float32, "cpu", case), torch.float32)
    assert blocks == [rows] * (shape.N // rows) + [shape.N % rows] * (shape.N % rows > 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["plain", "scaled", "softcap", "row_scale"])
def test_row_grad_in_place_equals_row_grad_out_of_place(case, dtype):
    for op in default_registry.ops():
        if op.name != "row_grad":
            continue
        for implementation in default_registry.implementations(op.name):
            if implementation.reason_against(Key(op.name, "cpu", dtype, 1024)) is None:
                inputs = op.inputs(op.shapes[0], dtype, "cpu", case)
                apart = implementation.function()(**inputs).clone()
                inputs["out"] = inputs["logits"]
                assert torch.equal(implementation.function()(**inputs), apart)


@pytest.mark.parametrize("op", default_registry.ops(), ids=lambda op: op.name)
def test_cost_formulas_grow_with_the_problem(op):
    small, large = op.shapes[1], op.shapes[1]._replace(N=2 * op.shapes[1].N)
    assert 0 < op.flops(small, torch.float32) < op.flops(large, torch.float32)
    assert 0 < op.bytes(small, torch.bfloat16) < op.bytes(small, torch.float32)


def _row_stats():
    """Each implementation of the statistics ops that can run here."""
    for op in default_registry.ops():
        for each in default_registry.implementations(op.name):
            if (
                op.name.startswith("row_stats")
                and each.reason_against(Key(op.name, "cpu", torch.float32, 1024)) is None
            ):
                yield op, each


@pytest.mark.parametrize("target", [-100, -1, 517, 2**40])
@pytest.mark.parametrize("op,implementation", list(_row_stats()), ids=lambda value: getattr(value, "name", value))
def test_a_target_out_of_range_is_nan_in_its_own_row_alone(op, implementation, target):
    inputs = op.inputs(Shape(5, 1, 517), torch.float32, "cpu", "plain")
    right = implementation.function()(**inputs)
    inputs["targets"][2] = target
    stats = implementation.function()(**inputs)
    assert [each.isnan().tolist() for each in (stats[0], stats[3])] == [[False, False, True, False, False]] * 2
    others = torch.arange(5) != 2
    for mine, its in zip(stats, right):
        assert torch.equal(mine[others], its[others])
    grad = next(each for each in default_registry.implementations("row_grad") if each.name == implementation.name)
    mapping = {name: inputs[name] for name in ("scale", "squash", "row_scale")}
    found = dict(zip(("logprob", "entropy", "row_max", "log_sum"), stats))
    g = torch.ones(5)
    out = grad.function()(
        inputs["logits"], inputs["targets"], **found, grad_logprob=g, grad_entropy=g, **mapping,
        out=torch.empty_like(inputs["logits"]),
    )  # fmt: skip
    assert out.isnan().all(1).tolist() == [False, False, True, False, False]
    assert out[others].isfinite().all()
