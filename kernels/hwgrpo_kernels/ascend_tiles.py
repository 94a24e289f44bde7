"""Block sizes of the row kernels on Ascend: what fits the unified buffer of a vector core. Plain arithmetic.

A vector core has no cache and no threads: it copies a block into its unified buffer, works on full vectors there, and
copies the result out. A block is one lane of `width` logits. One program runs per vector core and takes every n-th
row, so that a grid never nears the 65,535 programs a launch may have.

Never run on hardware: sizes and counts come from documents, and from reading what triton-ascend makes of the kernels.
"""

from collections.abc import Mapping
from typing import NamedTuple

from .tiles import Tile

LARGEST_GRID = 65_535  # the core dimension of a launch has 16 bits
LARGEST_VOCAB = 2**24  # indices are compared in fp32
ALIGNMENT = 32  # bytes; of a buffer in the unified buffer
SMALLEST_BLOCK = 64  # one instruction works on 256 bytes
LARGEST_BLOCK = 8192
# What the compiler takes for itself (temporaries of reductions and conversions, scalars) is not documented.
_USABLE = 0.8
_ACCUMULATOR = 4  # bytes of fp32; the vector units have no fp64


class Chip(NamedTuple):
    """What the planner needs to know of a chip.

    Args:
        unified_buffer: bytes per vector core.
        vector_cores: where the driver does not report them.
        source: where the numbers come from.
    """

    unified_buffer: int
    vector_cores: int
    source: str


_INI = "CANN's platform configuration of the chip"
# By the beginning of the name the driver gives; the longest that fits counts.
CHIPS: Mapping[str, Chip] = {
    "Ascend910B2": Chip(192 * 1024, 48, _INI),
    "Ascend910B3": Chip(192 * 1024, 40, _INI),
    "Ascend910B4": Chip(192 * 1024, 40, _INI),
    "Ascend910_93": Chip(192 * 1024, 48, f"{_INI}; cores of one die"),
    "Ascend950": Chip(248 * 1024, 56, _INI),
    "": Chip(192 * 1024, 40, "the smallest of the above, for chips unknown here"),
}


class RowKernel(NamedTuple):
    """What decides how much of the unified buffer a row kernel needs.

    Args:
        op: name of the row op.
        itemsize: bytes per logit, of the wider of input and output.
        softcap: whether logits are squashed.
    """

    op: str
    itemsize: int
    softcap: bool

    @property
    def live(self) -> int:
        """fp32 vectors of a block that are alive at once: one more than the most found in the lowered kernels."""
        return _LIVE[self.op][self.softcap]

    @property
    def streams(self) -> int:
        """Blocks of logits on their way in or out."""
        return _STREAMS[self.op]


# op -> without softcap, with it
_LIVE = {"row_stats": (7, 8), "row_grad": (6, 9), "row_stats_kl": (9, 11), "row_grad_kl": (8, 11)}
_STREAMS = {"row_stats": 1, "row_grad": 2, "row_stats_kl": 2, "row_grad_kl": 3}


def chip_of(arch: str) -> Chip:
    """Return the chip of an architecture ("Ascend910B2", "Ascend910_9391", ...)."""
    return CHIPS[max((name for name in CHIPS if arch.startswith(name)), key=len)]


def bytes_needed(kernel: RowKernel, block: int, buffers: int = 2) -> int:
    """Return the bytes of unified buffer that a block takes.

    Args:
        kernel: which.
        block: logits.
        buffers: copies in flight per stream; the compiler makes two by default.
    """
    vectors = kernel.live * _aligned(block * _ACCUMULATOR)
    return vectors + kernel.streams * buffers * _aligned(block * kernel.itemsize)


def tile_for(kernel: RowKernel, arch: str, vocab: int, buffers: int = 2) -> Tile:
    """Return the largest tile that fits: one lane, one program per vector core.

    Args:
        kernel: which.
        arch: as in `chip_of`.
        vocab: V; a row shorter than the block gets a smaller one.
        buffers: as in `bytes_needed`.
    """
    room = int((chip_of(arch).unified_buffer - ALIGNMENT) * _USABLE)
    block = LARGEST_BLOCK
    while block > SMALLEST_BLOCK and (block >= 2 * vocab or bytes_needed(kernel, block, buffers) > room):
        block //= 2
    assert bytes_needed(kernel, block, buffers) <= room, f"{kernel} does not fit {arch}"
    return Tile(lanes=1, width=block, warps=0, per_processor=1)


def vector_cores(properties: Mapping[str, int], arch: str) -> int:
    """Return the number of vector cores of a device, from the driver or else from its chip."""
    return properties.get("num_vectorcore") or chip_of(arch).vector_cores


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
