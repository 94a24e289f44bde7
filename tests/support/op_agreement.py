"""Whether a function computes an op: its outputs against the definition in fp64 on the same inputs."""

from collections.abc import Callable
from typing import Any

import torch
from hwgrpo_kernels import Op
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def in_fp64(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with copies of their floating tensors in fp64."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(torch.float64, copy=True)  # an `out` of fp64 must not be shared
        return value

    return {name: wide(value) for name, value in inputs.items()}


def as_outputs(op: Op, result: Any) -> dict[str, Tensor]:
    """Return what an implementation returned, by name."""
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    assert len(outputs) == len(op.outputs)
    return dict(zip(op.outputs, outputs))


def assert_agrees(op: Op, function: Callable[..., Any], inputs: dict[str, Any], dtype: torch.dtype) -> None:
    """Call `function` and hold its outputs to the tolerances the op declares for `dtype`."""
    truth = as_outputs(op, op.definition(**in_fp64(inputs)))
    for name, value in as_outputs(op, function(**inputs)).items():
        true = truth[name]
        assert value.shape == true.shape, name
        if name == "out":
            assert value.dtype == dtype
            error = (value.double() - true).norm()
            allowed = op.tolerance[dtype].backward * true.norm() + _unavoidable(inputs, value)
            assert error <= allowed, f"{name}: {error:.2e} of {true.norm():.2e}"
            continue
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        finite = true.isfinite() & (true > torch.finfo(torch.float32).min)
        assert torch.equal(value.isfinite() & (value > torch.finfo(torch.float32).min), finite), name
        assert torch.equal(value[~finite].sign().double(), true[~finite].sign()), f"{name}: inf, -inf or nan"
        error = ((value - true).abs() / (1 + true.abs()))[finite]
        assert (error <= op.tolerance[dtype].forward).all(), f"{name}: {error.max():.2e}"


def _unavoidable(inputs: dict[str, Any], value: Tensor) -> float:
    """What no implementation is to blame for: 1 - p cancels in the definition, and fp16 has few small numbers."""
    kind = torch.finfo(value.dtype)
    smallest = kind.smallest_normal * kind.eps
    grads = sum(float(inputs[name].norm()) for name in ("grad_logprob", "grad_kl") if name in inputs)
    return 32 * torch.finfo(torch.float64).eps * grads + smallest * value.numel() ** 0.5
