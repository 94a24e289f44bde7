"""Block sizes and warps of the Triton row kernels per architecture: plain data, and the rule that picks from it.

They follow from arithmetic: one 16-byte access per thread and lane, two lanes per thread so that 32 bytes are in
flight, 256 threads so that eight programs fill a processor, at most 16 warps of 64 on AMD. `source` says which were
measured. A program takes one row: those that loop over rows are for Ascend (`ascend_tiles.py`), until a measurement on
a GPU asks for them too.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Tile(NamedTuple):
    """How a program walks its row.

    Args:
        lanes, width: a block is lanes * width logits, powers of two; width neighbours are one access of one thread.
        warps: warps per program; 0 where there are none (Ascend).
        per_processor: programs per processor, each looping over rows; 0 means a program per row.
        stages: 2 reads the next block while this one is computed; 1 does not.
    """

    lanes: int
    width: int
    warps: int
    per_processor: int = 0
    stages: int = 1

    @property
    def block(self) -> int:
        """Logits per block."""
        return self.lanes * self.width


class ArchTiles(NamedTuple):
    """The tiles of one architecture, by bytes per logit.

    Args:
        warp_size: threads per warp.
        row_stats, row_grad: bytes per logit -> tile.
        source: where the numbers come from.
    """

    warp_size: int
    row_stats: Mapping[int, Tile]
    row_grad: Mapping[int, Tile]
    source: str = "derived, not measured"


_WARP_32 = {2: Tile(512, 8, 8), 4: Tile(512, 4, 8), 8: Tile(512, 2, 8)}
# On CDNA the next block waits in registers, which costs at most one wavefront of eight (kernels_compile.md). NVIDIA's
# compiler puts it into shared memory, with two barriers per block, where other programs hide the latency already.
_WARP_64 = {2: Tile(512, 8, 4, stages=2), 4: Tile(512, 4, 4, stages=2), 8: Tile(512, 2, 4)}
# Twice the bytes per thread where memory is faster than 256 threads of two accesses can ask for.
_WARP_32_WIDE = {2: Tile(1024, 8, 8), 4: Tile(1024, 4, 8), 8: Tile(512, 2, 8)}

TILES: Mapping[str, ArchTiles] = {
    "sm_80": ArchTiles(32, _WARP_32, _WARP_32),
    "sm_90": ArchTiles(32, _WARP_32, _WARP_32, "measured on an H100: within 5% of the best of 102 tiles"),
    "sm_100": ArchTiles(32, _WARP_32_WIDE, _WARP_32_WIDE),
    "sm_120": ArchTiles(32, _WARP_32, _WARP_32),
    "gfx90a": ArchTiles(64, _WARP_64, _WARP_64),
    "gfx942": ArchTiles(64, _WARP_64, _WARP_64),
    "gfx950": ArchTiles(64, _WARP_64, _WARP_64),
    "rdna": ArchTiles(32, _WARP_32, _WARP_32),
}


def table_key(arch: str) -> str:
    """Return the key of `TILES` for an architecture: itself, or the nearest older one of its family.

    Args:
        arch: "sm_90", "gfx942", "gfx1100", ...
    """
    if arch in TILES:
        return arch
    if arch.startswith("sm_"):
        known = sorted((key for key in TILES if key.startswith("sm_")), key=_number)
        return max((key for key in known if _number(key) <= _number(arch)), key=_number, default=known[0])
    return "gfx90a" if arch.startswith("gfx9") else "rdna"


def tile_for(op: str, arch: str, itemsize: int, vocab: int) -> Tile:
    """Return the tile of a row op.

    Args:
        op: "row_stats" or "row_grad".
        arch: as in `table_key`.
        itemsize: bytes per logit.
        vocab: V; a row shorter than the block gets a smaller one.
    """
    arch_tiles = TILES[table_key(arch)]
    tile: Tile = getattr(arch_tiles, op)[itemsize]
    while tile.warps > 1 and tile.block >= 2 * vocab:
        tile = tile._replace(lanes=tile.lanes // 2, warps=tile.warps // 2)
    return tile


def _number(arch: str) -> int:
    digits = arch.removeprefix("sm_").rstrip("af")  # sm_90a
    return int(digits)
