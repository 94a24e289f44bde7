"""Filters of the distribution to sample from: top-k, top-p, min-p; and which tokens they dropped, as one number."""

from __future__ import annotations

import torch


def filter_logits(logits_SV: torch.Tensor, *, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Set the logits outside top-k, then top-p, then min-p to -inf; the order and, but for ties, the sets are those of
    transformers.

    top-k keeps all tokens tied with the k-th; top-p keeps the fewest tokens whose probability (after top-k) reaches p
    (Holtzman et al. 2020, section 3.1), and all tied with the last of them, so that a floor describes the set; min-p
    keeps tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024, section 3).

    Args:
        logits_SV: [S, V] fp32, already divided by the temperature.
        top_k: number of tokens; 0 is off.
        top_p: probability; 1 is off.
        min_p: share of the largest probability; 0 is off.

    Returns:
        [S, V] fp32; the logits themselves where no filter applies.
    """
    if 0 < top_k < logits_SV.shape[-1]:
        kth = logits_SV.topk(top_k, dim=-1).values[:, -1:]
        logits_SV = logits_SV.masked_fill(logits_SV < kth, -torch.inf)
    if top_p < 1.0:
        ordered = logits_SV.sort(dim=-1, descending=True).values
        kept = (ordered.softmax(dim=-1).cumsum(dim=-1)[:, :-1] < top_p).sum(dim=-1, keepdim=True)
        logits_SV = logits_SV.masked_fill(logits_SV < ordered.gather(-1, kept), -torch.inf)
    if min_p > 0.0:
        # Compared as exp(difference), not as a difference of logits with log(min_p): this is the definition's rounding.
        relative = (logits_SV - logits_SV.amax(dim=-1, keepdim=True)).exp()
        logits_SV = logits_SV.masked_fill(relative < min_p, -torch.inf)
    return logits_SV


def logprob_floor(logits_SV: torch.Tensor, kept_SV: torch.Tensor) -> torch.Tensor:
    """Return the floor [S] fp32: half way between the least likely token kept and the likeliest dropped.

    As a log-prob under the softmax of all logits, it separates the tokens for other roundings of the same logits, too.
    It depends less on an update of the weights than a difference from the logit of one token would.

    Args:
        logits_SV: [S, V] fp32, before the filters.
        kept_SV: [S, V] fp32, after them.

    Returns:
        [S] fp32; -inf where nothing was dropped.
    """
    kept = kept_SV > -torch.inf
    least = logits_SV.masked_fill(~kept, torch.inf).amin(dim=-1)
    dropped = logits_SV.masked_fill(kept, -torch.inf).amax(dim=-1)
    return (least + dropped) / 2 - logits_SV.logsumexp(dim=-1)
