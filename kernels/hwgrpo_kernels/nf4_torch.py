"""`dequantize_nf4` in torch."""

import torch
from torch import Tensor

from .matrices import accumulated
from .nf4_format import BLOCK, CHUNK, TABLE


def dequantize_nf4(packed: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """See `definitions.dequantize_nf4`; looks up both values of a byte at once."""
    dtype, flat = accumulated(out.dtype), out.view(-1)
    table = torch.tensor(TABLE, dtype=dtype, device=out.device)
    pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=1)
    for start in range(0, flat.numel(), CHUNK):
        target = flat[start : start + CHUNK]
        size = target.numel()
        values = pairs.index_select(0, packed[start // 2 :][: -(-size // 2)].int()).flatten()[:size]
        scale = scales[start // BLOCK :][: -(-size // BLOCK)].to(dtype)
        rest = size % BLOCK
        full = size - rest
        torch.mul(values[:full].view(-1, BLOCK), scale[: full // BLOCK, None], out=values[:full].view(-1, BLOCK))
        if rest:
            values[full:] *= scale[-1]
        target.copy_(values)
    return out
