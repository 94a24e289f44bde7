"""NF4 (Dettmers et al. 2023, QLoRA, appendix E): 4-bit codes of values, scaled by the largest of each block.

A code is an index into a table of 16 values, quantiles of a normal distribution. Two codes share a byte, the first in
the high half: bitsandbytes' format without double quantization.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 64
"""Values that share a scale."""
TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Values of the codes, exact in fp32."""
CHUNK = 2**22
"""Values that torch converts at a time, since intermediate ones take more memory; a multiple of `BLOCK`."""


def quantize_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a tensor: for each value the nearest of the table times the scale of its block.

    Args:
        weight: [...] of n floating values; blocks follow its memory in order.

    Returns:
        codes [ceil(n / 2)] uint8; scales [ceil(n / BLOCK)] fp32, the largest absolute value of each block.
    """
    table = torch.tensor(TABLE, device=weight.device)
    between = (table[1:] + table[:-1]) / 2
    packed, scales = [], []
    for part in weight.detach().flatten().split(CHUNK):
        blocks = pad(part.float(), (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        scale = blocks.abs().amax(1)
        codes = torch.bucketize(blocks / scale.where(scale > 0, 1.0)[:, None], between, out_int32=True)
        pairs = codes.to(torch.uint8).view(-1, 2)
        packed.append((pairs[:, 0] << 4 | pairs[:, 1])[: -(-part.numel() // 2)])
        scales.append(scale)
    return torch.cat(packed), torch.cat(scales)
