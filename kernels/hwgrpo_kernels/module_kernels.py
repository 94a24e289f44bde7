# type: ignore  # a language of its own in Python's syntax, checked by Triton's compiler
"""RMSNorm, the gate of an MLP and rotary embeddings in Triton, with their gradients; module_triton.py launches them.

A program takes tiles of [ROWS,BLOCK]; BLOCK is the row, padded to a power of two. Arithmetic is fp32, rounded once at
the end. Programs of the backward of RMSNorm loop over rows and keep their part of the weight's gradient in registers:
the parts are added afterwards in a fixed order, so that the same call gives the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, update, weight, total, out, inverse_rms, rows, size, stride, update_stride, epsilon, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out = weight * x * inverse_rms, for inverse_rms = 1 / sqrt(mean(x^2) + epsilon), which is kept.

    With an update, total = x + update is kept and normed in place of x; else both are None.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    u = tl.load(x + row[:, None] * stride + column[None, :], inside, 0.0).to(tl.float32)
    if update is not None:
        u += tl.load(update + row[:, None] * update_stride + column[None, :], inside, 0.0).to(tl.float32)
        rounded = u.to(total.dtype.element_ty)
        tl.store(total + row[:, None] * size + column[None, :], rounded, inside)
        u = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(u * u, 1) / size + epsilon)
    tl.store(inverse_rms + row, inverse, row < rows)
    w = tl.load(weight + column, column < size, 0.0).to(tl.float32)
    normed = u * inverse[:, None] * w[None, :]
    tl.store(out + row[:, None] * size + column[None, :], normed.to(out.dtype.element_ty), inside)


@triton.jit
def rms_norm_grad_kernel(
    x, weight, inverse_rms, dout, dout_1, dout_2, dout_3, dout_4, dout_5, dtotal, dx, dupdate, dweight_parts, rows,
    size, stride, TRAINED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx [rows,size], and a program's part of dL/dweight, [size] each, if the weight is TRAINED.

    The gradients of the copies of the output, dout and up to five more or None, are added in fp32, in this order.
    Where x is the total of a residual and an update, dx has its own gradient dtotal in it, or None, and dupdate is dx
    in the update's dtype; else that is None.
    """
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, column < size, 0.0).to(tl.float32)
    part = tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < size)[None, :]
        place = row[:, None] * size + column[None, :]
        inverse = tl.load(inverse_rms + row, row < rows, 0.0)[:, None]
        normed = tl.load(x + row[:, None] * stride + column[None, :], inside, 0.0).to(tl.float32) * inverse
        g = tl.load(dout + place, inside, 0.0).to(tl.float32)
        if dout_1 is not None:
            g += tl.load(dout_1 + place, inside, 0.0).to(tl.float32)
        if dout_2 is not None:
            g += tl.load(dout_2 + place, inside, 0.0).to(tl.float32)
        if dout_3 is not None:
            g += tl.load(dout_3 + place, inside, 0.0).to(tl.float32)
        if dout_4 is not None:
            g += tl.load(dout_4 + place, inside, 0.0).to(tl.float32)
        if dout_5 is not None:
            g += tl.load(dout_5 + place, inside, 0.0).to(tl.float32)
        if TRAINED:
            part += tl.sum(g * normed, 0)
        g = g * w[None, :]
        along = tl.sum(g * normed, 1) / size
        d = inverse * (g - normed * along[:, None])
        if dtotal is not None:
            d += tl.load(dtotal + place, inside, 0.0).to(tl.float32)
        tl.store(dx + place, d.to(dx.dtype.element_ty), inside)
        if dupdate is not None:
            tl.store(dupdate + place, d.to(dupdate.dtype.element_ty), inside)
    if TRAINED:
        tl.store(dweight_parts + tl.program_id(0) * size + column, part, column < size)


@triton.jit
def columns_of(columns, BLOCK: tl.constexpr):
    """Return a program's row and its columns in it."""
    blocks = tl.cdiv(columns, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    return program // blocks, program % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def swiglu_kernel(gate, up, out, columns, gate_stride, up_stride, BLOCK: tl.constexpr):
    """out = silu(gate) * up."""
    row, column = columns_of(columns, BLOCK)
    inside = column < columns
    g = tl.load(gate + row * gate_stride + column, inside, 0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * columns + column, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), inside)


@triton.jit
def swiglu_grad_kernel(gate, up, dout, dgate, dup, columns, gate_stride, up_stride, BLOCK: tl.constexpr):
    """The gradients of gate and up, without gaps between rows."""
    row, column = columns_of(columns, BLOCK)
    inside = column < columns
    place = row * columns + column
    g = tl.load(gate + row * gate_stride + column, inside, 0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, inside, 0.0).to(tl.float32)
    d = tl.load(dout + place, inside, 0.0).to(tl.float32)
    share = tl.sigmoid(g)
    tl.store(dgate + place, (d * u * share * (1.0 + g * (1.0 - share))).to(dgate.dtype.element_ty), inside)
    tl.store(dup + place, (d * g * share).to(dup.dtype.element_ty), inside)


@triton.jit
def rotary_kernel(
    x, cos, sin, out, heads, length, size, x_batch, x_head, x_token, cos_batch, cos_token, out_batch, out_head,
    out_token, BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate the halves of each head of one token: (x1 c1 - x2 s1, x2 c2 + x1 s2), or backward, its transpose."""
    token = tl.program_id(0).to(tl.int64)
    batch, place = token // length, token % length
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    half = size // 2
    inside_half = column < half
    angles = batch * cos_batch + place * cos_token + column
    c1 = tl.load(cos + angles, inside_half, 0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos + angles + half, inside_half, 0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + angles, inside_half, 0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin + angles + half, inside_half, 0.0).to(tl.float32)[None, :]
    inside = (head < heads)[:, None] & inside_half[None, :]
    source = x + batch * x_batch + place * x_token + head[:, None] * x_head + column[None, :]
    x1 = tl.load(source, inside, 0.0).to(tl.float32)
    x2 = tl.load(source + half, inside, 0.0).to(tl.float32)
    if BACKWARD:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    there = out + batch * out_batch + place * out_token + head[:, None] * out_head + column[None, :]
    tl.store(there, y1.to(out.dtype.element_ty), inside)
    tl.store(there + half, y2.to(out.dtype.element_ty), inside)
