# type: ignore  # a language of its own in Python's syntax, checked by Triton's compiler
"""Attention of a decode step in Triton: one token per row over a shared prompt and the row's own response.

A program takes one key-value head of one row, with its query heads as the rows of a tile, padded to what a matrix unit
takes. Scores, the running softmax and the sums of values are fp32. Lengths are read from memory, so that a recorded
launch stays valid while responses grow.
"""

import triton
import triton.language as tl


@triton.jit
def rotate(x, angles_cos, angles_sin, row, inside, d, SIZE: tl.constexpr):
    """Heads at `x + row`, [.,D], rotated in fp32: x * cos + (-x2, x1) * sin for the halves x1, x2 of a head."""
    HALF: tl.constexpr = SIZE // 2
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    own = tl.load(x + row + d, inside, 0.0).to(tl.float32)
    other = tl.load(x + row + partner, inside, 0.0).to(tl.float32)
    return own * angles_cos + tl.where(d < HALF, -other, other) * angles_sin


@triton.jit
def attend(
    q, keys, values, begin, end, top, total, sums, scale, SIZE: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add tokens `begin` to `end` to the running softmax of a tile of queries [.,D].

    `top` [.] is the maximum of the scores so far, `total` [.] the sum of 2^(score - top), `sums` [.,D] that of values
    with these weights.
    """
    n, d = tl.arange(0, N), tl.arange(0, D)
    for start in tl.range(begin, end, N, num_stages=STAGES):
        token = start + n
        inside = (token < end)[:, None] & (d < SIZE)[None, :]
        place = token[:, None] * SIZE + d[None, :]
        k = tl.load(keys + place, inside, 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((token < end)[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        rescale = tl.exp2(top - highest)
        total = total * rescale + tl.sum(weights, 1)
        v = tl.load(values + place, inside, 0.0)
        sums = sums * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = highest
    return top, total, sums


@triton.jit(do_not_specialize=["width"])
def decode_attention_kernel(
    query, key, value, cos, sin, offset, prompts, prompt_of, prompt_length, responses, length, out, scale, width,
    query_row, query_head, key_row, key_head, value_row, value_head, prompts_kv, prompts_head, prompts_prompt,
    responses_kv, responses_head, responses_row, G: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`decode_definitions.decode_attention`; `scale` is the scaling times log2(e)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, g = tl.arange(0, D), tl.arange(0, TILE)
    of_head = d < SIZE
    tokens = tl.load(length + row)
    of_prompt = tl.load(prompt_length + row)
    angles = (tl.load(offset + row) + tokens) * SIZE + d
    c = tl.load(cos + angles, of_head, 0.0).to(tl.float32)
    s = tl.load(sin + angles, of_head, 0.0).to(tl.float32)

    q_row = row * query_row + (head * G + g)[:, None] * query_head
    q_inside = (g < G)[:, None] & of_head[None, :]
    q = rotate(query, c[None, :], s[None, :], q_row, q_inside, d[None, :], SIZE).to(query.dtype.element_ty)
    k = rotate(key, c, s, row * key_row + head * key_head, of_head, d, SIZE).to(responses.dtype.element_ty)
    v = tl.load(value + row * value_row + head * value_head + d, of_head, 0.0)
    keys = responses + head.to(tl.int64) * responses_head + row * responses_row
    newest = (tokens - 1) * SIZE + d
    tl.store(keys + newest, k, of_head)
    tl.store(keys + responses_kv + newest, v, of_head)

    # The newest token comes from registers, and first: the maximum is finite from the start.
    top = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
    total = tl.full((TILE,), 1.0, tl.float32)
    sums = tl.zeros((TILE, D), tl.float32) + v.to(tl.float32)[None, :]
    shared = prompts + head.to(tl.int64) * prompts_head + tl.load(prompt_of + row) * prompts_prompt
    top, total, sums = attend(
        q, shared, shared + prompts_kv, width - of_prompt.to(tl.int32), width, top, total, sums, scale, SIZE, D, N,
        STAGES,
    )  # fmt: skip
    top, total, sums = attend(
        q, keys, keys + responses_kv, 0, tokens.to(tl.int32) - 1, top, total, sums, scale, SIZE, D, N, STAGES
    )
    heads = G * tl.num_programs(1)
    there = (row * heads + head * G + g)[:, None] * SIZE + d[None, :]
    tl.store(out + there, (sums / total[:, None]).to(out.dtype.element_ty), q_inside)
