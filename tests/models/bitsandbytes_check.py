"""Compare NF4 with bitsandbytes', which this process alone imports: peft would find it in others."""

import bitsandbytes.functional as theirs  # pyright: ignore[reportMissingImports]
import hwgrpo_kernels
import torch


def main() -> None:
    """Hold codes, scales and values to be equal."""
    compared = 0
    for dtype in (torch.float32, torch.bfloat16):
        for size in ((193, 517), (64, 100), (1, 64), (3, 1)):
            weight = torch.randn(size, generator=torch.Generator().manual_seed(size[1])).to(dtype)
            compared += _equal(weight)
        compared += _equal(torch.linspace(-1, 1, 6400).view(64, 100).to(dtype))
        compared += _equal(torch.zeros(2, 64, dtype=dtype))
    print(compared, "tensors are equal")


def _equal(weight: torch.Tensor) -> int:
    codes, scales = hwgrpo_kernels.quantize_nf4(weight)
    packed, state = theirs.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    assert torch.equal(packed.flatten()[: len(codes)], codes), f"codes of {tuple(weight.shape)}"
    assert torch.equal(state.absmax, scales), f"scales of {tuple(weight.shape)}"
    out = torch.empty_like(weight)
    function = hwgrpo_kernels.resolve("dequantize_nf4", "cpu", out.dtype, out.shape[1]).function
    assert torch.equal(theirs.dequantize_4bit(packed, state), function(packed=codes, scales=scales, out=out)), "values"
    return 1


if __name__ == "__main__":
    main()
