"""A penalty for repeated n-grams of tokens."""

from __future__ import annotations

from hwgrpo.errors import ConfigError
from hwgrpo.values import Completions, PromptBatch


def repetition(
    batch: PromptBatch, completions: Completions, *, ngram_size: int = 3, max_penalty: float = -1.0
) -> list[float]:
    """Penalize repeated n-grams of tokens: max_penalty * (1 - different n-grams / all n-grams).

    Args:
        batch: the prompts, unused.
        completions: the responses; the stop token counts.
        ngram_size: tokens of an n-gram; the paper has 40, which finds long repeated passages only.
        max_penalty: what a response of one repeated n-gram approaches, at most 0.

    Returns:
        One number in [max_penalty, 0] per response, 0 for fewer than `ngram_size` tokens.

    Raises:
        ConfigError: an argument is out of its range.

    Source: TRL's `get_repetition_penalty_reward`; the idea is that of Yeo et al. (arXiv 2502.03373), appendix C.2,
    where each repeated token is penalized by itself.
    """
    if ngram_size < 1:
        raise ConfigError(f"kwargs.ngram_size={ngram_size} of reward repetition; allowed: from 1")
    if not max_penalty <= 0:
        raise ConfigError(f"kwargs.max_penalty={max_penalty} of reward repetition; allowed: at most 0")
    return [max_penalty * repeated_share(tokens, ngram_size) for tokens in completions.new_tokens()]


def repeated_share(tokens: list[int], size: int) -> float:
    """Return the share of n-grams of `size` tokens that occurred before in the list."""
    ngrams = len(tokens) - size + 1
    if ngrams < 1:
        return 0.0
    return 1 - len(set(zip(*(tokens[start:] for start in range(size)), strict=False))) / ngrams
