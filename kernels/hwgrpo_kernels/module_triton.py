"""Fused modules in Triton, differentiable: norms, the gate of an MLP, rotations; module_kernels.py has the kernels.

Each computes in fp32 and rounds once: to the dtype that torch promotes its operands to, as the plain modules of
transformers do, or to one that the caller names. They take fp32, bf16 and fp16.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
from torch import Tensor

from . import module_kernels
from .rows_triton import processors

TILE = 4096
"""Elements per tile of RMSNorm: with 8 warps 16 of a thread."""
ELEMENTS = 4096
"""Elements per program of the gate: with 8 warps of 64 threads one access of 16 bytes each in 16-bit, of 32 two."""
PER_PROCESSOR = 2
"""Programs per processor of the backward of RMSNorm; each writes a part of the weight's gradient."""
HEADS = 8
"""Heads per program of the rotation."""
MOST_COPIES = 6
"""Most copies of one RMSNorm; its backward takes so many gradients: queries, keys and values, with adapters."""

_kernels: Any = module_kernels


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + epsilon), [..., H].

    Args:
        x: [..., H].
        weight: [H].
        epsilon: added to the mean of squares.
        dtype: of the result; None: the one that torch promotes both to.
    """
    return _RmsNorm.apply(x, weight, epsilon, dtype, 1)[0]  # pyright: ignore[reportOptionalSubscript]


def rms_norm_copies(
    x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype | None, count: int
) -> tuple[Tensor, ...]:
    """Return `rms_norm` as several tensors over the same memory, one for each of its readers.

    The gradients of the copies are added in fp32 whatever their dtype, in the order of the copies. If the last reader
    has the first copy, that is the order in which autograd adds them where every reader casts an fp32 result itself.

    Args:
        x, weight, epsilon, dtype: as for `rms_norm`.
        count: number of copies, at most `MOST_COPIES`.
    """
    return _RmsNorm.apply(x, weight, epsilon, dtype, count)  # pyright: ignore[reportReturnType]


def add_rms_norm(
    x: Tensor, update: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None, count: int = 1
) -> tuple[Tensor, ...]:
    """Return x + update, in the dtype that torch promotes both to, and copies of its `rms_norm`.

    Args:
        x, update: [..., H]; the residual stream, and what a layer adds to it.
        weight, epsilon, dtype, count: as for `rms_norm_copies`.
    """
    return _AddRmsNorm.apply(x, update, weight, epsilon, dtype, count)  # pyright: ignore[reportReturnType]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., I], both of one dtype."""
    return _Swiglu.apply(gate, up)  # pyright: ignore[reportReturnType]


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return x * cos + (-x2, x1) * sin for the halves x1, x2 of each head.

    Args:
        x: [B, heads, L, D], in any layout with neighbouring elements of a head; the result has the same.
        cos, sin: [B or 1, L, D]; they get no gradient.
        dtype: of the result; None: the one that torch promotes both to.
    """
    return _Rotation.apply(x, cos, sin, dtype)  # pyright: ignore[reportReturnType]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype | None, copies: int
    ) -> tuple[Tensor, ...]:
        return _norm(ctx, x, None, weight, epsilon, dtype, copies)[1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dx, _, dweight = _norm_gradients(ctx, None, gradients, None, trained=ctx.needs_input_grad[1])
        return dx, dweight, None, None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype | None, copies: int
    ) -> tuple[Tensor, ...]:
        ctx.dtypes = x.dtype, update.dtype
        return _norm(ctx, x, update, weight, epsilon, dtype, copies)

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        dtotal, *of_copies = gradients
        of_x, of_update = ctx.dtypes
        if all(each is None for each in of_copies):
            dx, dupdate = (None if dtotal is None else dtotal.to(dtype) for dtype in ctx.dtypes)
            return dx, dupdate, None, None, None, None
        dx, dupdate, dweight = _norm_gradients(ctx, dtotal, of_copies, of_update, trained=ctx.needs_input_grad[2])
        return None if dx is None else dx.to(of_x), dupdate, dweight, None, None, None


def _norm(
    ctx: Any,
    x: Tensor,
    update: Tensor | None,
    weight: Tensor,
    epsilon: float,
    dtype: torch.dtype | None,
    copies: int,
) -> tuple[Tensor, ...]:
    """Return x + update (x itself without one), and copies of its RMSNorm; save what the backward needs."""
    assert 1 <= copies <= MOST_COPIES
    x_NH = _rows(x)
    rows, size = x_NH.shape
    update_NH = total = None
    if update is not None:
        update_NH = _rows(update)
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, update.dtype))
    normed = x if total is None else total
    out = x.new_empty(x.shape, dtype=dtype or torch.promote_types(normed.dtype, weight.dtype))
    inverse_rms = x.new_empty(rows, dtype=torch.float32)
    if rows:
        with torch.accelerator.device_index(x.device.index):
            _kernels.rms_norm_kernel[(triton.cdiv(rows, _tile_rows(size)),)](
                x_NH, update_NH, weight, total, out, inverse_rms, rows, size, x_NH.stride(0),
                0 if update_NH is None else update_NH.stride(0), epsilon, **_tile(size),
            )  # fmt: skip
    ctx.save_for_backward(x_NH if total is None else total.view(rows, size), weight, inverse_rms)
    ctx.shape = x.shape
    ctx.set_materialize_grads(False)
    return normed, out, *(out.view_as(out) for _ in range(copies - 1))


def _norm_gradients(
    ctx: Any, dtotal: Tensor | None, gradients: Sequence[Tensor | None], of_update: torch.dtype | None, *, trained: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of what was normed, of the update in its dtype if it has one, and of a trained weight."""
    of_copies: list[Tensor | None] = [each.contiguous() for each in gradients if each is not None]
    if not of_copies:
        return None, None, None
    of_copies += [None] * (MOST_COPIES - len(of_copies))
    x_NH, weight, inverse_rms = ctx.saved_tensors
    rows, size = x_NH.shape
    programs = min(triton.cdiv(rows, _tile_rows(size)), PER_PROCESSOR * processors())
    dx = torch.empty_like(x_NH, memory_format=torch.contiguous_format)
    lower = of_update is not None and of_update != dx.dtype
    dupdate = torch.empty_like(dx, dtype=of_update) if lower else None
    parts = x_NH.new_empty(programs if trained else 0, size, dtype=torch.float32)
    if rows:
        with torch.accelerator.device_index(x_NH.device.index):
            _kernels.rms_norm_grad_kernel[(programs,)](
                x_NH, weight, inverse_rms, *of_copies, None if dtotal is None else dtotal.contiguous(), dx, dupdate,
                parts, rows, size, x_NH.stride(0), TRAINED=trained, **_tile(size),
            )  # fmt: skip
    dx = dx.view(ctx.shape)
    dweight = parts.sum(0).to(weight.dtype) if trained else None
    return dx, dx if dupdate is None else dupdate.view(ctx.shape), dweight


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate_NI, up_NI = _rows(gate), _rows(up)
        out = gate.new_empty(gate.shape)
        _launch_gate(_kernels.swiglu_kernel, gate_NI, up_NI, out)
        ctx.save_for_backward(gate_NI, up_NI)
        ctx.shape = gate.shape
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate_NI, up_NI = ctx.saved_tensors
        dgate, dup = (each.new_empty(ctx.shape) for each in (gate_NI, up_NI))
        _launch_gate(_kernels.swiglu_grad_kernel, gate_NI, up_NI, gradients[0].contiguous(), dgate, dup)
        return dgate, dup


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _rotated(x, cos, sin, dtype or torch.promote_types(x.dtype, cos.dtype), backward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, sin, ctx.dtype, backward=True), None, None, None


def _launch_gate(kernel: Any, gate_NI: Tensor, up_NI: Tensor, *others: Tensor) -> None:
    (rows, columns), count = gate_NI.shape, gate_NI.numel()
    if count == 0:
        return
    if gate_NI.is_contiguous() and up_NI.is_contiguous():
        rows, columns = 1, count
    with torch.accelerator.device_index(gate_NI.device.index):
        kernel[(rows * triton.cdiv(columns, ELEMENTS),)](
            gate_NI, up_NI, *others, columns, gate_NI.stride(0), up_NI.stride(0), BLOCK=ELEMENTS, num_warps=8
        )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, backward: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    batch, heads, length, size = x.shape
    if x.numel():
        with torch.accelerator.device_index(x.device.index):
            _kernels.rotary_kernel[(batch * length, triton.cdiv(heads, HEADS))](
                x, cos, sin, out, heads, length, size, *x.stride()[:3], 0 if len(cos) == 1 else cos.stride(0),
                cos.stride(1), *out.stride()[:3], BACKWARD=backward, HEADS=HEADS,
                HALF=_padded(size // 2), num_warps=2,
            )  # fmt: skip
    return out


def _rows(x: Tensor) -> Tensor:
    """Return [..., H] as [N, H] with neighbouring elements in a row; rows may lie apart."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _tile_rows(size: int) -> int:
    return max(1, TILE // _padded(size))


def _tile(size: int) -> dict[str, int]:
    return {"ROWS": _tile_rows(size), "BLOCK": _padded(size), "num_warps": 8}


def _padded(size: int) -> int:
    return int(triton.next_power_of_2(size))  # pyright: ignore[reportArgumentType]  (a constexpr in a kernel alone)
