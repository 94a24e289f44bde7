"""Check an implementation against its op's definition: `check_kernel(implementation, device)`, for vendors.

`python -m hwgrpo_kernels.testing DEVICE` checks every implementation that can run there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .op import Implementation, Key, Op, Shape, shape_class
from .registry import KernelRegistry, default_registry

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_kernel(implementation: Implementation, device: str, registry: KernelRegistry = default_registry) -> list[str]:
    """Compare an implementation with its op's definition: every case, shape and dtype that it supports.

    Args:
        device: torch device to run on ("cpu"). Its own backend must have been imported.
        registry: where the op is declared.

    Returns:
        one line per dtype: the number of calls compared, or why the dtype is unsupported.

    Raises:
        AssertionError: a result is wrong; the message names output, case, shape and dtype.
    """
    op = next(each for each in registry.ops() if each.name == implementation.op)
    lines = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        key = Key(op.name, torch.device(device).type, dtype, shape_class(op.shapes[0].V))
        if reason := implementation.reason_against(key):
            lines.append(f"{name}: not run, {reason}")
            continue
        function, ran = implementation.function(), 0
        for case, shape in cases(op, dtype):
            inputs = op.inputs(shape, dtype, device, case)
            if implementation.declines is not None and implementation.declines(**inputs) is not None:
                continue
            try:
                assert_agrees(op, function, inputs, dtype)
            except AssertionError as error:
                where = f"{op.name}={implementation.name}, {name}, case {case}, {shape}"
                raise AssertionError(f"{where}: {error}") from None
            ran += 1
        assert ran, f"{op.name}={implementation.name} declines every call in {name}: reject it in `supports`"
        lines.append(f"{name}: {ran} calls agree with the definition")
    assert any("agree" in line for line in lines), f"it cannot run on {device}: {'; '.join(lines)}"
    return lines


def cases(op: Op, dtype: torch.dtype) -> Iterator[tuple[str, Shape]]:
    """Yield the cases of an op with their shapes."""
    for case in op.cases:
        for shape in op.shapes if dtype == torch.float32 else op.shapes[:1]:
            yield case, shape


def assert_agrees(op: Op, function: Callable[..., Any], inputs: dict[str, Any], dtype: torch.dtype) -> None:
    """Assert that the outputs of `function` are within the op's tolerances for `dtype`.

    The reference is the definition in fp64 on the host, for every device.
    """
    exact = in_fp64(inputs)
    truth = as_outputs(op, op.definition(**exact))
    outputs = as_outputs(op, function(**inputs))
    for name in op.written:
        near = op.tolerance[dtype].forward
        torch.testing.assert_close(inputs[name].cpu().double(), exact[name], rtol=near, atol=near, equal_nan=True)
    for name, output in outputs.items():
        true, value = truth[name], output.cpu()
        assert value.shape == true.shape, f"{name} has the shape {list(value.shape)}, not {list(true.shape)}"
        if not true.is_floating_point():
            assert torch.equal(value, true), f"{name} differs in {int((value != true).sum())} of {len(true)} rows"
            continue
        if name == "out":
            assert value.dtype == dtype, f"{name} is {value.dtype}, not {dtype}"
            error = (value.double() - true).norm()
            allowed = op.tolerance[dtype].backward * true.norm() + _unavoidable(inputs, value)
            assert error <= allowed, f"{name}: {error:.2e} of {true.norm():.2e}"
            continue
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert value.dtype == wide, f"{name} is {value.dtype}, not {wide}"
        finite = true.isfinite() & (true > torch.finfo(torch.float32).min)
        same = torch.equal(value.isfinite() & (value > torch.finfo(torch.float32).min), finite)
        assert same, f"{name} is finite at other entries than the definition"
        assert torch.equal(value[~finite].sign().double(), true[~finite].sign()), f"{name}: inf, -inf or nan"
        error = ((value - true).abs() / (1 + true.abs()))[finite]
        assert (error <= op.tolerance[dtype].forward).all(), f"{name}: off by {error.max():.2e}"


def in_fp64(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs on the host, with copies of their floating tensors in fp64."""

    def wide(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # An `out` of fp64 must not be shared.
        return value.to("cpu", torch.float64, copy=True) if value.is_floating_point() else value.cpu()

    return {name: wide(value) for name, value in inputs.items()}


def as_outputs(op: Op, result: Any) -> dict[str, Tensor]:
    """Return an implementation's outputs by name."""
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    assert len(outputs) == len(op.outputs), f"{len(outputs)} outputs, not {len(op.outputs)}: {', '.join(op.outputs)}"
    return dict(zip(op.outputs, outputs, strict=True))


def _unavoidable(inputs: dict[str, Any], value: Tensor) -> float:
    """Return the error of any implementation: 1 - p cancels in the definition, and fp16 has few small numbers."""
    kind = torch.finfo(value.dtype)
    smallest = kind.smallest_normal * kind.eps
    grads = sum(float(inputs[name].norm()) for name in ("grad_logprob", "grad_kl") if name in inputs)
    return 32 * torch.finfo(torch.float64).eps * grads + smallest * value.numel() ** 0.5


def main(arguments: list[str]) -> int:
    """Check every implementation that can run on a device, as `python -m hwgrpo_kernels.testing DEVICE`."""
    if len(arguments) != 1:
        print("usage: python -m hwgrpo_kernels.testing DEVICE   (a torch device, e.g. cpu)", file=sys.stderr)
        return 2
    device, failed = arguments[0], 0
    for op in default_registry.ops():
        for implementation in default_registry.implementations(op.name):
            key = Key(op.name, torch.device(device).type, torch.float32, shape_class(op.shapes[0].V))
            name = f"{op.name}={implementation.name}"
            if reason := implementation.reason_against(key):
                print(f"SKIP  {name}: {reason}")
                continue
            try:
                print(f"PASS  {name}: {'; '.join(check_kernel(implementation, device))}")
            except Exception as error:  # check the next ones
                failed += 1
                print(f"FAIL  {name}: {type(error).__name__}: {error}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
