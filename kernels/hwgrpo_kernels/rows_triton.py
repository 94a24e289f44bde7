"""The row ops in Triton: launch arguments of triton_kernels.py from the arguments of an op."""

from ctypes import c_float
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from . import ascend_tiles, triton_kernels
from .matrices import has_dense_rows, with_dense_rows
from .tiles import TILES, Tile, table_key, tile_for

_LOG2_E = 1.4426950408889634
_ACCESS_BYTES = 16


class Precision(NamedTuple):
    """What the kernels need to know of the dtype they accumulate in.

    Args:
        dtype: fp32, or fp64 for fp64 logits.
        constants: ACC, LOWEST (smallest finite number), FLOOR (2 and e to this power are 0, and far from overflow),
            TERMS (of the series for log1p and expm1).
    """

    dtype: torch.dtype
    constants: dict[str, Any]


def _precision_of(dtype: torch.dtype, acc: Any, floor: float, terms: int) -> Precision:
    return Precision(dtype, {"ACC": acc, "LOWEST": torch.finfo(dtype).min, "FLOOR": floor, "TERMS": terms})


_FP32 = _precision_of(torch.float32, tl.float32, -300.0, 8)
_FP64 = _precision_of(torch.float64, tl.float64, -1200.0, 16)
_kernels: Any = triton_kernels


def row_stats(
    logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `definitions.row_stats`. A target out of range gives NaN, since asking a device would wait for it."""
    with torch.accelerator.device_index(logits.device.index):
        return launch_row_stats(
            _tile("row_stats", logits, logits, squash), logits, targets, scale, squash, row_scale, with_entropy
        )


def row_grad(
    logits: Tensor,
    targets: Tensor,
    logprob: Tensor,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
    out: Tensor,
) -> Tensor:
    """See `definitions.row_grad`; `out` may be `logits` itself."""
    with torch.accelerator.device_index(logits.device.index):
        return launch_row_grad(
            _tile("row_grad", logits, out, squash), logits, targets, logprob, entropy, row_max, log_sum, grad_logprob,
            grad_entropy, scale, squash, row_scale, out,
        )  # fmt: skip


def row_stats_kl(
    logits: Tensor, ref_logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None
) -> tuple[Tensor, ...]:
    """See `definitions.row_stats_kl`."""
    with torch.accelerator.device_index(logits.device.index):
        tile = _tile("row_stats_kl", logits, logits, squash)
        return launch_row_stats_kl(tile, logits, ref_logits, targets, scale, squash, row_scale)


def row_grad_kl(
    logits: Tensor, ref_logits: Tensor, targets: Tensor, logprob: Tensor, entropy: Tensor | None, row_max: Tensor,
    log_sum: Tensor, kl: Tensor, kl_others: Tensor, ref_logprob: Tensor, ref_max: Tensor, ref_log_sum: Tensor,
    grad_logprob: Tensor, grad_entropy: Tensor | None, grad_kl: Tensor, scale: float, squash: float,
    row_scale: Tensor | None, out: Tensor,
) -> Tensor:  # fmt: skip
    """See `definitions.row_grad_kl`; `out` may be `logits` itself."""
    with torch.accelerator.device_index(logits.device.index):
        return launch_row_grad_kl(
            _tile("row_grad_kl", logits, out, squash), logits, ref_logits, targets, logprob, entropy, row_max, log_sum,
            kl, kl_others, ref_logprob, ref_max, ref_log_sum, grad_logprob, grad_entropy, grad_kl, scale, squash,
            row_scale, out,
        )  # fmt: skip


def launch_row_stats(
    tile: Tile, logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`row_stats` with a given tile, on the current device."""
    rows = logits.shape[0]
    dtype = _precision(logits).dtype
    # three allocations: torch refuses a custom op whose results share memory
    logprob, row_max, log_sum = (logits.new_empty(rows, dtype=dtype) for _ in range(3))
    entropy = logits.new_empty(rows if with_entropy else 0, dtype=dtype)
    _launch_stats(tile, logits, None, targets, scale, squash, row_scale, (logprob, entropy, row_max, log_sum))
    return logprob, entropy, row_max, log_sum


def launch_row_stats_kl(
    tile: Tile, logits: Tensor, ref_logits: Tensor, targets: Tensor, scale: float, squash: float,
    row_scale: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`row_stats_kl` with a given tile, on the current device."""
    found = tuple(logits.new_empty(logits.shape[0], dtype=_precision(logits).dtype) for _ in range(9))
    _launch_stats(tile, logits, ref_logits, targets, scale, squash, row_scale, found)
    return found


def _launch_stats(
    tile: Tile, logits: Tensor, ref_logits: Tensor | None, targets: Tensor, scale: float, squash: float,
    row_scale: Tensor | None, found: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """Fill `found`, the outputs of `row_stats`, or of `row_stats_kl` where there are reference logits."""
    rows, vocab = logits.shape
    if rows == 0:
        return
    logits, ref_logits = with_dense_rows(logits), None if ref_logits is None else with_dense_rows(ref_logits)
    (align, stride), (ref_align, ref_stride) = aligned_stride(logits), _ref_stride(ref_logits)
    beside = found[4:] or (None,) * 5
    _kernels.row_stats_kernel[_grid(tile, rows)](
        logits, ref_logits, targets.contiguous(), _vector(row_scale), *found[:4], *beside, rows, vocab, stride,
        ref_stride, *_split(squash), *_split(scale * _LOG2_E),
        SQUASH=squash != 0.0, ENTROPY=found[1].shape[0] == rows, ALIGN=align, REF_ALIGN=ref_align,
        STAGES=_stages(tile, align, squash, ref_logits), **_precision(logits).constants, **_constants(tile),
    )  # fmt: skip


def launch_row_grad(
    tile: Tile, logits: Tensor, targets: Tensor, logprob: Tensor, entropy: Tensor | None, row_max: Tensor,
    log_sum: Tensor, grad_logprob: Tensor, grad_entropy: Tensor | None, scale: float, squash: float,
    row_scale: Tensor | None, out: Tensor,
) -> Tensor:  # fmt: skip
    """`row_grad` with a given tile, on the current device."""
    stats = logprob, entropy, row_max, log_sum, *(None,) * 5
    wanted = grad_logprob, grad_entropy, None
    return _launch_grad(tile, logits, None, targets, stats, wanted, scale, squash, row_scale, out)


def launch_row_grad_kl(
    tile: Tile, logits: Tensor, ref_logits: Tensor, targets: Tensor, logprob: Tensor, entropy: Tensor | None,
    row_max: Tensor, log_sum: Tensor, kl: Tensor, kl_others: Tensor, ref_logprob: Tensor, ref_max: Tensor,
    ref_log_sum: Tensor, grad_logprob: Tensor, grad_entropy: Tensor | None, grad_kl: Tensor, scale: float,
    squash: float, row_scale: Tensor | None, out: Tensor,
) -> Tensor:  # fmt: skip
    """`row_grad_kl` with a given tile, on the current device."""
    stats = logprob, entropy, row_max, log_sum, kl, kl_others, ref_logprob, ref_max, ref_log_sum
    wanted = grad_logprob, grad_entropy, grad_kl
    return _launch_grad(tile, logits, ref_logits, targets, stats, wanted, scale, squash, row_scale, out)


def _launch_grad(
    tile: Tile, logits: Tensor, ref_logits: Tensor | None, targets: Tensor, stats: tuple[Tensor | None, ...],
    wanted: tuple[Tensor | None, ...], scale: float, squash: float, row_scale: Tensor | None, out: Tensor,
) -> Tensor:  # fmt: skip
    """Write the gradient to `out`, from the outputs of the statistics op and dL/dlogprob, dL/dentropy, dL/dkl."""
    rows, vocab = logits.shape
    if rows == 0:
        return out
    if not has_dense_rows(out):
        dense = torch.empty_like(out, memory_format=torch.contiguous_format)
        return out.copy_(
            _launch_grad(tile, logits, ref_logits, targets, stats, wanted, scale, squash, row_scale, dense)
        )
    _, entropy, *_ = stats
    _, grad_entropy, _ = wanted
    assert grad_entropy is None or entropy is not None, "an entropy gradient without entropies"
    logits, ref_logits = with_dense_rows(logits), None if ref_logits is None else with_dense_rows(ref_logits)
    (align, stride), (ref_align, ref_stride) = aligned_stride(logits), _ref_stride(ref_logits)
    out_align, out_stride = aligned_stride(out)
    _kernels.row_grad_kernel[_grid(tile, rows)](
        logits, ref_logits, targets.contiguous(), _vector(row_scale), *map(_vector, stats), *map(_vector, wanted), out,
        rows, vocab, stride, ref_stride, out_stride, *_split(squash), *_split(scale * _LOG2_E),
        SQUASH=squash != 0.0, ENTROPY=grad_entropy is not None, ALIGN=align, REF_ALIGN=ref_align, OUT_ALIGN=out_align,
        STAGES=_stages(tile, align, squash, ref_logits), **_precision(logits).constants, **_constants(tile),
    )  # fmt: skip
    return out


def interpreted() -> bool:
    """Whether Triton's CPU interpreter replaces a device (TRITON_INTERPRET=1 at import)."""
    return not isinstance(_kernels.row_stats_kernel, triton.JITFunction)


def _tile(op: str, logits: Tensor, out: Tensor, squash: float) -> Tile:
    arch, vocab = _arch(), logits.shape[1]
    if _is_ascend(arch):
        itemsize = max(logits.element_size(), out.element_size())
        return ascend_tiles.tile_for(ascend_tiles.RowKernel(op, itemsize, squash != 0.0), arch, vocab)
    # fp32 logits with a gradient in 16 bits are read in two accesses, to write it in one
    return tile_for(op.removesuffix("_kl"), arch, min(logits.element_size(), out.element_size()), vocab)


def _is_ascend(arch: str) -> bool:
    return arch.startswith("Ascend")


def _arch() -> str:
    if interpreted():
        return "sm_90"  # any tile works: tiles change only the order of sums
    target = _driver().get_current_target()
    return f"sm_{target.arch}" if isinstance(target.arch, int) else target.arch


def _grid(tile: Tile, rows: int) -> tuple[int]:
    if tile.per_processor == 0:
        return (rows,)
    return (min(rows, tile.per_processor * processors()),)


def processors() -> int:
    """Return the processors of the current device; 1 in the interpreter."""
    if interpreted():
        return 1
    driver = _driver()
    properties = driver.utils.get_device_properties(driver.get_current_device())
    arch = _arch()
    return ascend_tiles.vector_cores(properties, arch) if _is_ascend(arch) else properties["multiprocessor_count"]


def warp_size() -> int:
    """Return the threads per warp of the current device."""
    return TILES[table_key(_arch())].warp_size


def _driver() -> Any:
    return triton.runtime.driver.active


def _constants(tile: Tile) -> dict[str, Any]:
    constants = {"LANES": tile.lanes, "WIDTH": tile.width, "PERSISTENT": tile.per_processor > 0}
    return constants | {"num_warps": tile.warps, "num_stages": 1} if tile.warps else constants


def _stages(tile: Tile, align: int, squash: float, ref_logits: Tensor | None) -> int:
    """Return the tile's stages; 1 where blocks in flight would cost registers of narrow reads or of more operands."""
    return tile.stages if align > 1 and squash == 0.0 and ref_logits is None else 1


def _precision(logits: Tensor) -> Precision:
    return _FP64 if logits.dtype == torch.float64 else _FP32


def _split(value: float) -> tuple[float, float]:
    """Split a number into two that are exact in fp32 and sum to it, to 48 bits."""
    high = c_float(value).value
    return high, c_float(value - high).value


def _vector(values: Tensor | None) -> Tensor | None:
    """Return [N] values next to each other; gradients often come expanded from one number."""
    return None if values is None else values.contiguous()


def aligned_stride(matrix: Tensor) -> tuple[int, int]:
    """Return (a, s) whose product is the row stride; a is 16 bytes of logits where these divide it, else 1.

    a is a constant of the kernel: the compiler then knows that a first row on a 16-byte boundary, which it looks for
    itself, makes every row begin on one and every access of 16 bytes legal; nothing is compiled again for a stride.
    """
    per_access = _ACCESS_BYTES // matrix.element_size()
    stride = matrix.stride(0)
    return (1, stride) if stride % per_access else (per_access, stride // per_access)


def _ref_stride(ref_logits: Tensor | None) -> tuple[int, int]:
    return (1, 0) if ref_logits is None else aligned_stride(ref_logits)
