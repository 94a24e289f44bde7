"""`dequantize_nf4` in torch."""

import functools

import torch
from torch import Tensor

from .matrices import accumulated
from .nf4_format import BLOCK, CHUNK, TABLE


def dequantize_nf4(packed: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """See `definitions.dequantize_nf4`; looks up both values of a byte at once."""
    dtype, flat = accumulated(out.dtype), out.view(-1)
    pairs = _pairs(dtype, out.device)
    for start in range(0, flat.numel(), CHUNK):
        target = flat[start : start + CHUNK]
        size = target.numel()
        values = pairs.index_select(0, packed[start // 2 :][: -(-size // 2)].int()).view(dtype).flatten()[:size]
        scale = scales[start // BLOCK :][: -(-size // BLOCK)].to(dtype)
        rest = size % BLOCK
        full = size - rest
        torch.mul(values[:full].view(-1, BLOCK), scale[: full // BLOCK, None], out=values[:full].view(-1, BLOCK))
        if rest:
            values[full:] *= scale[-1]
        target.copy_(values)
    return out


@functools.cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return both values of each byte, bit for bit in int64: a CPU looks single elements up 8 times as fast as rows."""
    table = torch.tensor(TABLE, dtype=dtype, device=device)
    return torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=1).view(torch.int64).squeeze(1)
