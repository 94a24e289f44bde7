"""Probabilities of tokens for tests of advantages, which depend on a token's place and its response's length alone."""

import torch

from hwgrpo.algorithms.token_advantages import TokenProbs


def token_probs(lengths: torch.Tensor) -> TokenProbs:
    """Return those of responses of these lengths [S]: of a token between 1/12 and 11/12, and half of the rest."""
    lengths_R = lengths.repeat_interleave(lengths)
    place_R = torch.cat([torch.arange(length) for length in [0, *lengths.tolist()]])
    prob_R = (1 + (7 * lengths_R + 3 * place_R) % 11) / 12
    return TokenProbs(prob_R.log(), prob_R.square() + 0.5 * (1 - prob_R).square())
