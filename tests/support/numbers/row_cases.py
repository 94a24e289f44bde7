"""What the tests of the Triton row kernels share: tiles small enough that a short row has many blocks, and calls."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from hwgrpo_kernels import default_registry, rows_triton
from hwgrpo_kernels.tiles import Tile
from torch import Tensor

ROW_OPS = tuple(op for op in default_registry.ops() if op.name.startswith("row_"))
STATS, GRAD, STATS_KL, GRAD_KL = ROW_OPS

DEVICE = "cpu" if rows_triton.interpreted() else "cuda"  # hw: the type that the Triton kernels are registered for
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


def assert_same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Hold results to those for the same rows laid out otherwise: to the bit; on a device sums change their order."""
    for one, other in zip(found, expected, strict=True):
        eps = 0.0 if DEVICE == "cpu" else max(1e-5, 2 * torch.finfo(other.dtype).eps)
        torch.testing.assert_close(one, other, rtol=eps, atol=eps * 1e-2)


def statistics(op: Any, inputs: dict[str, Any], targets: Tensor) -> dict[str, Any]:
    """Return what a gradient op is given of its statistics op, for other targets."""
    names = inspect.signature(STATS_KL.definition if op is GRAD_KL else STATS.definition).parameters
    given = {name: inputs[name] for name in names if name in inputs} | {"targets": targets}
    if op is GRAD_KL:
        return dict(zip(STATS_KL.outputs, STATS_KL.definition(**given)))
    return dict(zip(STATS.outputs, STATS.definition(**given, with_entropy=True)))
