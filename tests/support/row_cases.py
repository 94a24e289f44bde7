"""What the tests of the Triton row kernels share: tiles small enough that a short row has many blocks, and calls."""

import inspect
from collections.abc import Callable
from typing import Any

from hwgrpo_kernels import default_registry, rows_triton
from hwgrpo_kernels.tiles import Tile
from torch import Tensor

ROW_OPS = tuple(op for op in default_registry.ops() if op.name.startswith("row_"))
STATS, GRAD, STATS_KL, GRAD_KL = ROW_OPS

NARROW = Tile(lanes=16, width=8, warps=4)  # V = 517: four whole blocks and a tail of five
PERSISTENT = NARROW._replace(per_processor=2)  # the interpreter has one processor: two programs for all rows


def with_tile(op: Any, tile: Tile) -> Callable[..., Any]:
    """Return the Triton implementation of a row op with this tile in place of the table's."""
    launch = getattr(rows_triton, f"launch_{op.name}")
    return lambda **inputs: launch(tile, **inputs)


def from_table(op: Any) -> Callable[..., Any]:
    """Return the Triton implementation of a row op as it is registered."""
    [triton] = [each for each in default_registry.implementations(op.name) if each.name == "triton"]
    return triton.function()


def statistics(op: Any, inputs: dict[str, Any], targets: Tensor) -> dict[str, Any]:
    """Return what a gradient op is given of its statistics op, for other targets."""
    names = inspect.signature(STATS_KL.definition if op is GRAD_KL else STATS.definition).parameters
    given = {name: inputs[name] for name in names if name in inputs} | {"targets": targets}
    if op is GRAD_KL:
        return dict(zip(STATS_KL.outputs, STATS_KL.definition(**given)))
    return dict(zip(STATS.outputs, STATS.definition(**given, with_entropy=True)))
