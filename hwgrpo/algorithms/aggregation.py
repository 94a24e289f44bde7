"""How per-token losses become one number: each mode as a weight per token, from counts of the full update.

With the weight inside each row's loss, `sum over rows of weight * loss` is the globally normalised loss however the
rows were cut into micro-batches and spread over ranks. The modes carry verl's names (`agg_loss`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hwgrpo.catalog import AGGREGATIONS
from hwgrpo.errors import ConfigError


@dataclass(frozen=True)
class Totals:
    """Counts of the full update, over all ranks."""

    tokens: int
    """Response tokens that carry loss."""
    sequences: int
    """Sequences with at least one such token; all sequences to reproduce TRL's `grpo` and `dr_grpo`."""
    norm_length: int | None = None
    """The fixed length that `seq-mean-token-sum-norm` divides by (verl's loss_scale_factor, TRL's
    max_completion_length)."""
    prompts: int = 0
    """Prompts with at least one such token."""
    prompt_tokens_S: torch.Tensor | None = None
    """[S] such tokens of all sequences of a sequence's prompt, for `prompt-mean`."""


def count(lengths_S: torch.Tensor, *, count_empty: bool = False) -> tuple[int, int]:
    """Count the tokens and sequences of one rank; add over ranks to get the totals of an update.

    Args:
        lengths_S: [S] integers: loss-carrying tokens per sequence.
        count_empty: also count sequences without a token, as TRL's sequence means do; verl's do not.

    Returns:
        (tokens, sequences).
    """
    sequences = lengths_S.numel() if count_empty else int((lengths_S > 0).sum())
    return int(lengths_S.sum()), sequences


def tokens_of_prompts(lengths_S: torch.Tensor, prompt_S: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the tokens of all sequences of each sequence's prompt [S], and the number of prompts with tokens.

    Args:
        lengths_S: [S] integers: loss-carrying tokens per sequence of one rank's part of the update.
        prompt_S: [S] int64: index of its prompt, whose sequences are all here.
    """
    tokens_P = torch.zeros(int(prompt_S.max()) + 1 if len(prompt_S) else 0, dtype=lengths_S.dtype)
    tokens_P = tokens_P.index_add(0, prompt_S, lengths_S)
    return tokens_P[prompt_S], int((tokens_P > 0).sum())


def token_weights(
    mode: str,
    lengths_S: torch.Tensor,
    *,
    total_tokens: int,
    total_sequences: int,
    norm_length: int | None = None,
    total_prompts: int = 0,
    prompt_tokens_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weight of each token of each sequence.

    Args:
        mode: a name in `AGGREGATIONS`.
        lengths_S: [S] integers: loss-carrying tokens per sequence, of any part of the update.
        total_tokens: tokens of the full update, over all ranks.
        total_sequences: sequences of the full update; whether empty ones count is the caller's choice (see `count`).
        norm_length: tokens; only for `seq-mean-token-sum-norm`.
        total_prompts: prompts with tokens of the full update; only for `prompt-mean`.
        prompt_tokens_S: [S] from `tokens_of_prompts`; only for `prompt-mean`.

    Returns:
        [S] fp32: what every token of sequence i is multiplied by; 0 for an empty sequence.

    Raises:
        ConfigError: an unknown mode, or `norm_length` is missing or not positive where the mode divides by it.
    """
    totals = Totals(total_tokens, total_sequences, norm_length, total_prompts, prompt_tokens_S)
    weight_S = AGGREGATIONS.load(mode)(lengths_S.double(), totals)
    return torch.where(lengths_S > 0, weight_S, 0.0).float()


def token_mean(lengths_S: torch.Tensor, totals: Totals) -> torch.Tensor:
    """Every token weighs 1/N. DAPO's choice (Yu et al. 2025, section 3.3)."""
    return torch.full_like(lengths_S, 1.0 / max(totals.tokens, 1))


def token_sum(lengths_S: torch.Tensor, totals: Totals) -> torch.Tensor:
    """Every token weighs 1: the loss grows with the batch."""
    return torch.ones_like(lengths_S)


def seq_mean_token_sum(lengths_S: torch.Tensor, totals: Totals) -> torch.Tensor:
    """Every token weighs 1/S: the mean over sequences of their summed losses."""
    return torch.full_like(lengths_S, 1.0 / max(totals.sequences, 1))


def seq_mean_token_sum_norm(lengths_S: torch.Tensor, totals: Totals) -> torch.Tensor:
    """Every token weighs 1/(S * norm_length): Dr.GRPO (Liu et al. 2025, section 3)."""
    # verl falls back to the padded width of the micro-batch, which would make the loss depend on how it was cut.
    if totals.norm_length is None or totals.norm_length <= 0:
        raise ConfigError(
            f"norm_length={totals.norm_length!r}: aggregation 'seq-mean-token-sum-norm' divides by a fixed length; "
            "give a positive number of tokens, usually the longest response allowed"
        )
    return seq_mean_token_sum(lengths_S, totals) / totals.norm_length


def seq_mean_token_mean(lengths_S: torch.Tensor, totals: Totals) -> torch.Tensor:
    """A token of sequence i weighs 1/(len_i S): GRPO as published (Shao et al. 2024, equation 3)."""
    return seq_mean_token_sum(lengths_S, totals) / lengths_S.clamp(min=1)


def prompt_mean(lengths_S: torch.Tensor, totals: Totals) -> torch.Tensor:
    """A token weighs 1/(tokens of its prompt's responses * prompts): every prompt has the same say, as in SkyRL."""
    assert totals.prompt_tokens_S is not None, "prompt-mean needs the tokens of prompts"
    return 1.0 / (totals.prompt_tokens_S.double().clamp(min=1) * max(totals.prompts, 1))
