"""`token_logprob` and `linear_logprob`: log-probabilities and entropies of target tokens, differentiable."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import argument_checks, inplace, kept_tokens, library, vocab_logprob
from .guards import compute_dtype_of, refuse_compiled_region
from .logit_map import logit_map
from .square_sum import check_square_sum
from .vocab_checks import raise_on_all_ranks


class TokenLogprob(NamedTuple):
    """Per row: logprob [N], and entropy and square_sum [N] or None; fp32 (fp64 for fp64 inputs)."""

    logprob: Tensor
    entropy: Tensor | None
    square_sum: Tensor | None = None
    """Sum of the squared probabilities of the row's distribution."""


def token_logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
    inplace_backward: bool = False,
) -> TokenLogprob:
    """Return the log-probability (nats) of each row's target under softmax(logits / temperature).

    Args:
        logits: [N,V], any floating dtype, any strides; -inf marks entries that cannot be drawn.
        targets: [N] int64 in [0,V).
        temperature: positive number, or [N] one per row.
        with_entropy: also return the entropy (nats) of each row.
        inplace_backward: let the (only) backward overwrite the logits with their gradient, which saves [N,V] memory.
            Another backward that needs their values raises torch's error for modified tensors. Ignored without grad
            mode.

    Returns:
        `TokenLogprob`; statistics accumulate in fp32 whatever the dtype of the logits. A row of only -inf has
        logprob -inf, entropy 0 and no gradient.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or range, or logits cannot hold their gradient.
        RuntimeError: called with inplace_backward inside a compiled region.
    """
    argument_checks.check_logits(logits)
    argument_checks.check_targets(targets, logits, "targets", "logits")
    argument_checks.check_map(temperature, None, 1.0, logits.shape[0], logits)
    mapping = logit_map(temperature, None, 1.0)
    if inplace_backward and torch.is_grad_enabled():
        return TokenLogprob(*inplace.token_logprob(logits, targets.long(), mapping, with_entropy))
    stats = library.token_logprob(logits, targets.long(), *mapping, with_entropy)
    return TokenLogprob(stats[0], stats[1] if with_entropy else None)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    with_entropy: bool = False,
    with_square_sum: bool = False,
    chunk_rows: int | None = None,
    logits_dtype: torch.dtype | None = None,
    vocab_group: dist.ProcessGroup | None = None,
    logprob_floor: Tensor | None = None,
) -> TokenLogprob:
    """Return the log-probability (nats) of each row's target without materializing [N,V] logits.

    Backward recomputes the logits chunk by chunk (8 N H V FLOPs in all with a trainable head, 6 with a frozen one).

    Args:
        hidden: [N,H]; its dtype (autocast's, where autocast is on) is that of the GEMMs.
        weight: [V,H], cast once per call; its gradient accumulates in fp32 and returns in its own dtype.
        targets: [N] int64 in [0,V).
        bias: [V] or None.
        temperature: positive number, or [N] one per row.
        softcap: c of z = c tanh(z/c), applied before the temperature; None for none. It makes -c of a bias of -inf.
        logit_scale: positive factor on the raw logits, before the softcap.
        with_entropy: also return the entropy (nats) of each row.
        with_square_sum: also return the sum of squared probabilities of each row, without gradient, which costs one
            more read of the logits. Does not support a vocab_group.
        chunk_rows: rows of logits at once; None picks them from V, dtype and device type alone.
        logits_dtype: torch.float32 keeps the products of 16-bit operands in fp32; None leaves them in 16 bits.
        vocab_group: process group over which the head is sharded by rows, in rank order, any number each. weight
            [V_r,H], bias [V_r] and their gradients are then this rank's shard; all other arguments, the results and
            the gradient of hidden (all-reduced in backward) are the same on all ranks. All ranks must call forward
            and backward together; each chunk costs an all-gather of four numbers per row. Release the results before
            the group is destroyed.
        logprob_floor: [N] fp32, nats: the distribution is that of the tokens whose log-prob under the full one is at
            least this, and of the target, as after top-k, top-p or min-p; -inf: of all. Has no gradient, and does not
            support a softcap or a vocab_group.

    Returns:
        `TokenLogprob`, fp32 (fp64 for fp64 hidden states).

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or range, or what has no gradient is to have one.
        RuntimeError: called with a vocab_group inside a compiled region.
    """
    if vocab_group is not None:
        refuse_compiled_region("linear_logprob with a vocab_group")
    with raise_on_all_ranks(vocab_group):
        names = argument_checks.HeadNames()
        argument_checks.check_head(hidden, weight, bias, names)
        argument_checks.check_targets(targets, hidden, names.targets, names.hidden)
        argument_checks.check_map(temperature, softcap, logit_scale, hidden.shape[0], hidden)
        chunk_rows = argument_checks.check_chunk_rows(chunk_rows)
        compute_dtype = compute_dtype_of(hidden)
        argument_checks.check_logits_dtype(logits_dtype, compute_dtype)
        kept_tokens.check_floor(logprob_floor, hidden, softcap, vocab_group)
        check_square_sum(with_square_sum, vocab_group)
    mapping = logit_map(temperature, softcap, logit_scale)
    rows = hidden.to(compute_dtype), weight, targets.long(), bias
    squares = None
    if logprob_floor is not None or with_square_sum:
        options = with_entropy, chunk_rows, logits_dtype, logprob_floor, with_square_sum
        stats, squares = library.score_rows(*rows, mapping, *options)
    elif vocab_group is None:
        stats = library.linear_logprob(*rows, *mapping, with_entropy, chunk_rows, logits_dtype)
    else:
        stats = vocab_logprob.linear_logprob(*rows, mapping, with_entropy, chunk_rows, logits_dtype, vocab_group)
    return TokenLogprob(stats[0], stats[1] if with_entropy else None, squares)
