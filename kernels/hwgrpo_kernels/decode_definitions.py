"""The truth of the decode ops in plain torch, accumulating in fp32 (fp64 for fp64 inputs).

Shapes: B rows, each a response that grows by a token; H key-value heads with G query heads each, head size D; P prompts
of at most W tokens, padded on the left; buffers of C response tokens per row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .matrices import accumulated


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    offset: Tensor,
    prompts: Tensor,
    prompt_of: Tensor,
    prompt_length: Tensor,
    responses: Tensor,
    length: Tensor,
    scaling: float,
) -> Tensor:
    """Attend from each row's newest token to its prompt and its response so far.

    The newest token's query and key are rotated at its position, offset + length, and its key and value stored in the
    row's buffer, at length - 1. What lies beyond a length is not read.

    Args:
        query: [B,H*G,D], not rotated; rows and heads may lie apart.
        key, value: [B,H,D], likewise.
        cos, sin: [positions,D], the two halves of D equal, as transformers makes them.
        offset: [B] int64, position before each response's first token: prompt_length - 1 where positions count tokens,
            which those of images do not.
        prompts: [2,H,P,W,D], rotated keys and values.
        prompt_of: [B] int64, each row's prompt.
        prompt_length: [B] int64, tokens of it, at least 1.
        responses: [2,H,B,C,D], rotated keys and values; written in place.
        length: [B] int64, tokens of each response, the newest included, 1 to C.
        scaling: factor of the scores.

    Returns:
        [B,H*G*D] in the query's dtype.
    """
    rows, heads = query.shape[0], key.shape[1]
    wide = accumulated(query.dtype)
    position, newest = offset + length, length - 1
    query, key = (rotated(each, cos[position], sin[position]) for each in (query, key))
    row = torch.arange(rows, device=query.device)
    for stored, each in zip(responses, (key, value)):
        stored[:, row, newest] = each.transpose(0, 1)

    width, capacity = prompts.shape[3], responses.shape[3]
    columns = [torch.arange(size, device=query.device) for size in (width, capacity)]
    read = torch.cat([columns[0] >= width - prompt_length[:, None], columns[1] < length[:, None]], 1)[:, None]
    keys, values = torch.cat([prompts[:, :, prompt_of], responses], 3).to(wide).transpose(1, 2)  # [B,H,W+C,D] each
    scores = query.to(wide).unflatten(1, (heads, -1)) @ keys.transpose(2, 3) * scaling
    weights = scores.masked_fill(~read[:, None], -torch.inf).softmax(3)
    # 0 * NaN is NaN: buffers hold anything where no token is
    found = weights @ values.masked_fill(~read[..., None], 0.0)
    return found.to(query.dtype).flatten(1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [B,heads,D] rotated by angles [B,D], x * cos + (-x2, x1) * sin for the halves x1, x2 of a head."""
    wide = accumulated(x.dtype)
    first, second = x.to(wide).chunk(2, 2)
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]
    return (torch.cat([first, second], 2) * cos + torch.cat([-second, first], 2) * sin).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, [N,I], rounded once.

    Args:
        gate, up: [N,I]; rows may lie apart.
    """
    wide = accumulated(gate.dtype)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)
