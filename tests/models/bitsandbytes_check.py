"""Compare NF4 with bitsandbytes' on a CPU, which this process alone imports: peft would find it in others."""

import io

import bitsandbytes as theirs  # pyright: ignore[reportMissingImports]
import hwgrpo_kernels
import torch
from torch import nn

from hwgrpo.models.quantization import QuantizedLinear

DTYPES = (torch.float32, torch.bfloat16)


def main() -> None:
    """Hold codes, scales and values, and what a layer computes and saves, to be equal."""
    compared = 0
    for dtype in DTYPES:
        for size in ((193, 517), (64, 100), (1, 64), (3, 1)):
            weight = torch.randn(size, generator=torch.Generator().manual_seed(size[1])).to(dtype)
            compared += _equal(weight)
        compared += _equal(torch.linspace(-1, 1, 6400).view(64, 100).to(dtype))
        compared += _equal(torch.zeros(2, 64, dtype=dtype))
    print(compared, "tensors are equal")
    for dtype in DTYPES:
        _equal_layers(dtype)
        print(f"a layer in {dtype} is equal: forward, backward, saved and loaded")


def _equal(weight: torch.Tensor) -> int:
    codes, scales = hwgrpo_kernels.quantize_nf4(weight)
    packed, state = theirs.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    assert torch.equal(packed.flatten()[: len(codes)], codes), f"codes of {tuple(weight.shape)}"
    assert torch.equal(state.absmax, scales), f"scales of {tuple(weight.shape)}"
    values = hwgrpo_kernels.dequantize_nf4(codes, scales, weight.shape, weight.dtype)
    assert torch.equal(theirs.functional.dequantize_4bit(packed, state), values), "values"
    return 1


def _equal_layers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(128, 96)
    layer = _linear4bit(dtype)
    layer.load_state_dict(plain.state_dict())
    layer = layer.to("cpu")  # which quantizes
    ours = QuantizedLinear(plain, "nf4")
    mine, other = (torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(2))
    expected, found = layer(other.requires_grad_()), ours(mine.requires_grad_())
    assert torch.equal(found, expected), "outputs"
    for output in (expected, found):
        output.float().pow(2).sum().backward()
    assert mine.grad is not None
    assert other.grad is not None
    assert torch.equal(mine.grad, other.grad), "gradients"
    saved = _saved(layer)
    again = _linear4bit(dtype)
    states = {name.removeprefix("weight."): value for name, value in saved.items() if name.startswith("weight.")}
    again.weight = theirs.nn.Params4bit.from_prequantized(saved["weight"], states, device="cpu")
    again.bias.data = saved["bias"]
    assert torch.equal(again(other), expected), "outputs of a layer that was saved and loaded"
    loaded = QuantizedLinear(nn.Linear(128, 96), "nf4")
    loaded.load_state_dict(_saved(ours))
    assert torch.equal(loaded(mine), found), "outputs of our layer that was saved and loaded"


def _saved(layer: nn.Module) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _linear4bit(dtype: torch.dtype) -> nn.Module:
    return theirs.nn.Linear4bit(128, 96, compute_dtype=dtype, quant_type="nf4", compress_statistics=False)


if __name__ == "__main__":
    main()
