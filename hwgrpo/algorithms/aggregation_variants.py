"""Loss aggregation besides `token-mean`: sums, means over sequences, means over prompts; see `aggregation.py`."""

from __future__ import annotations

import torch

from hwgrpo.algorithms.aggregation import Totals
from hwgrpo.errors import ConfigError


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
