"""A program for compute-sanitizer: every row op once at a small size, or (`beyond`) a load outside of all memory."""

import sys

import torch
import triton
import triton.language as tl
from hwgrpo_kernels.op import Shape

from tests.support.numbers.row_cases import DEVICE, NARROW, PERSISTENT, ROW_OPS, with_tile


@triton.jit
def load_beyond(values, out):
    tl.store(out, tl.load(values + 2**20))


def main() -> None:
    if sys.argv[1:] == ["beyond"]:
        load_beyond[(1,)](torch.zeros(4, device=DEVICE), torch.zeros(1, device=DEVICE))
    else:
        for op in ROW_OPS:
            for tile in (NARROW, PERSISTENT):
                with_tile(op, tile)(**op.inputs(Shape(3, 0, 517), torch.bfloat16, DEVICE, "row_scale"))
    torch.cuda.synchronize()  # hw: a fault shows here
    print("launched")


if __name__ == "__main__":
    main()
