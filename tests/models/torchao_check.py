"""Compare quantized weights with torchao's on a CPU: it rounds scales that we do not, so values differ a little."""

import io
from typing import Any

import torch
from torch import nn
from torchao.quantization import (  # pyright: ignore[reportMissingImports]
    Int8WeightOnlyConfig,
    quantize_,
    to_nf4,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4  # pyright: ignore[reportMissingImports]

from hwgrpo.models.quantization import QuantizedLinear

DTYPES = (torch.float32, torch.bfloat16)


def main() -> None:
    """Compute and save a layer of each kind; compare its values with ours."""
    for dtype in DTYPES:
        print(f"nf4 in {dtype}: {_nf4(dtype):.2%} of the bytes of codes differ")
        print(f"int8 in {dtype}: values differ by {_int8(dtype):.2f} steps at most")


def _linear(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(128, 96, bias=False).to(dtype)


def _backward(output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> None:
    """Hold output and gradient to be those of an ordinary layer of the dequantized weight, but for rounding."""
    output.sum().backward()
    for found, exact in ((output, input @ weight.T), (input.grad, torch.ones_like(output) @ weight)):
        assert found is not None
        # scales, weights and results are rounded
        assert (found - exact).norm() <= 3 * torch.finfo(exact.dtype).eps * exact.norm()


def _saved(weight: Any) -> Any:
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _nf4(dtype: torch.dtype) -> float:
    layer = _linear(dtype)
    theirs = to_nf4(layer.weight.detach(), block_size=64, scaler_block_size=64)
    ours = QuantizedLinear(layer, "nf4")
    values, input = theirs.get_original_weight(), torch.randn(5, 128, dtype=dtype, requires_grad=True)
    _backward(linear_nf4(input, theirs), input, values)
    assert torch.equal(_saved(theirs).get_original_weight(), values)
    error = (ours.dequantized(dtype) - values).float().norm() / values.float().norm()
    assert 0 < error < 0.03, float(error)  # of the 9 % by which both differ from the weight
    codes = theirs.quantized_data.flatten()
    return float((ours.weight[: len(codes)] != codes).float().mean())


def _int8(dtype: torch.dtype) -> float:
    layer = _linear(dtype)
    ours = QuantizedLinear(layer, "int8").dequantized(dtype)
    step = layer.weight.detach().float().abs().amax(1, keepdim=True) / 127
    quantize_(layer, Int8WeightOnlyConfig())
    values, input = layer.weight.dequantize().detach(), torch.randn(5, 128, dtype=dtype, requires_grad=True)
    _backward(layer(input), input, values)
    assert torch.equal(_saved(layer.weight.data).dequantize(), values)
    steps = float(((ours - values).float().abs() / step).max())
    assert 0 < steps < 2, steps
    return steps


if __name__ == "__main__":
    main()
