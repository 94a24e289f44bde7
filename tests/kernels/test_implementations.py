"""Generated from the op declarations: every implementation that can run here agrees with the definition in fp64."""

from typing import Any

import pytest
import torch
from hwgrpo_kernels import Key, default_registry
from hwgrpo_kernels.op import shape_class
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def runnable():
    """(op, implementation, dtype, case, shape) for all that can run on this machine's CPU."""
    for op in default_registry.ops():
        for implementation in default_registry.implementations(op.name):
            for dtype in DTYPES:
                key = Key(op.name, "cpu", dtype, shape_class(op.shapes[0].V))
                if implementation.reason_against(key) is None:
                    for case in op.cases:
                        for shape in op.shapes if dtype == torch.float32 else op.shapes[:1]:
                            tag = f"{op.name}-{implementation.name}-{str(dtype)[6:]}-{case}-{'x'.join(map(str, shape))}"
                            yield pytest.param(op, implementation, dtype, case, shape, id=tag)


def in_fp64(inputs: dict[str, Any]) -> dict[str, Any]:
    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return {name: wide(value) for name, value in inputs.items()}


def as_outputs(op, result):
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    assert len(outputs) == len(op.outputs)
    return dict(zip(op.outputs, outputs))


@pytest.mark.parametrize("op,implementation,dtype,case,shape", list(runnable()))
def test_implementation_equals_the_definition(op, implementation, dtype, case, shape):
    inputs = op.inputs(shape, dtype, "cpu", case)
    truth = as_outputs(op, op.definition(**in_fp64(inputs)))
    kept = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor) and name != "out"}
    actual = as_outputs(op, implementation.function()(**inputs))
    for name, value in actual.items():
        true = truth[name]
        assert value.shape == true.shape, name
        if name == "out":
            assert value.dtype == dtype
            true = true.to(dtype).double()  # tiny gradients vanish in fp16 however exact they were
            error = (value.double() - true).norm() / true.norm().clamp(min=1e-6)
            assert error <= op.tolerance[dtype].backward, f"{name}: {error:.2e}"
            continue
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        finite = true.isfinite() & (true > torch.finfo(torch.float32).min)
        assert torch.equal(value.isfinite() & (value > torch.finfo(torch.float32).min), finite), name
        error = ((value - true).abs() / (1 + true.abs()))[finite]
        assert (error <= op.tolerance[dtype].forward).all(), f"{name}: {error.max():.2e}"
    for name, value in kept.items():
        torch.testing.assert_close(inputs[name], value, rtol=0, atol=0, equal_nan=True, msg=f"{name} was overwritten")


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
