"""What estimators with one advantage per token, rewards of steps or probabilities of tokens declare and need."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from hwgrpo.algorithms.scope import sequence_sum
from hwgrpo.catalog import ADVANTAGES, ESTIMATORS, POLICY_LOSSES
from hwgrpo.config.bound_arguments import bind_arguments
from hwgrpo.config.schema import AdvantageConfig, AlgorithmConfig
from hwgrpo.errors import ConfigError, shown
from hwgrpo.ragged import offsets_of
from hwgrpo.values import StepRewards

F = TypeVar("F", bound=Callable[..., torch.Tensor])
ARGUMENTS_OF_STEP = ("parts", "steps", "greedy_S", "token_probs", "kl_R")
"""Arguments of estimators that have a value of each step, if an estimator has them."""


class TokenProbs(NamedTuple):
    """Of response tokens under the old policy: log-probs, and sums of squared probabilities, [R] fp32 each."""

    logprobs: torch.Tensor
    square_sums: torch.Tensor
    """Sum over the vocabulary, of the distribution that a token is drawn from."""


def token_level(estimator: F) -> F:
    """Declare that an estimator returns one advantage per response token [R] instead of one per sequence [S]."""
    estimator.token_level = True  # type: ignore[attr-defined] - functions have attributes
    return estimator


def is_token_level(config: AdvantageConfig, kl_in_reward: bool) -> bool:
    """Return whether the estimator of the settings returns one advantage per response token.

    Those with an argument `kl_R` do with the KL in the reward: a token has the KL from itself on.
    """
    always = bool(getattr(ADVANTAGES.load(config.name), "token_level", False))
    return always or (kl_in_reward and takes(config, "kl_R"))


def takes(config: AdvantageConfig, argument: str) -> bool:
    """Return whether the estimator of the settings has an argument of this name, e.g. `steps`, the steps' rewards."""
    return argument in inspect.signature(ADVANTAGES.load(config.name)).parameters


def check_arguments(config: AdvantageConfig) -> None:
    """Check that the estimator accepts the keyword arguments of the settings, before the first step does.

    Raises:
        ConfigError: it does not, or each step gives it one of them.
    """
    of_step = [name for name in ARGUMENTS_OF_STEP if takes(config, name)]
    for name in of_step:
        if name in config.kwargs:
            raise ConfigError(
                f"algorithm.advantage.kwargs.{name}={shown(config.kwargs[name])}: each step gives the estimator "
                f"{config.name!r} its own {name}; leave it out"
            )
    arguments = {**config.kwargs, **dict.fromkeys(of_step)}
    bind_arguments(ADVANTAGES.load(config.name), arguments, 5, "algorithm.advantage.kwargs")


def check_token_level(algorithm: AlgorithmConfig) -> None:
    """Check that what reads one advantage per sequence does not get one per token.

    Raises:
        ConfigError: with the setting that reads one per sequence.
    """
    if not is_token_level(algorithm.advantage, algorithm.kl.in_reward):
        return
    by_kl = "" if is_token_level(algorithm.advantage, False) else " with algorithm.kl.in_reward=true"
    reason = f"algorithm.advantage.name={algorithm.advantage.name!r}{by_kl} has one advantage per token, but"
    if getattr(POLICY_LOSSES.load(algorithm.loss.name), "needs_sequence_advantages", False):
        raise ConfigError(
            f"{reason} algorithm.loss.name={algorithm.loss.name!r} is the loss of a sequence with one advantage; use "
            "ppo_clip, or gspo for ratios of sequences"
        )
    if algorithm.off_policy_threshold is not None:
        raise ConfigError(
            f"{reason} algorithm.off_policy_threshold masks sequences by the sign of theirs; set it to null"
        )


def mean_over_tokens(values_R: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """Return [S] fp32 the mean of each sequence's tokens; 0 where it has none."""
    sums_S, _ = sequence_sum(values_R.double(), offsets_of(lengths_S))
    return (sums_S / lengths_S.clamp(min=1)).float()


def sum_before(values_R: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """Return [R] fp64 the sum of the values at a sequence's earlier tokens; 0 at its first."""
    before_R = values_R.double().cumsum(0) - values_R
    first_R = torch.repeat_interleave(lengths_S.cumsum(0) - lengths_S, lengths_S)
    return before_R - before_R[first_R]


def required_token_probs(config: AdvantageConfig, token_probs: TokenProbs | None) -> TokenProbs:
    """Return the probabilities, or raise ConfigError without them."""
    if token_probs is None:
        raise ConfigError(
            f"algorithm.advantage.name={config.name!r} reads the probabilities of response tokens: pass token_probs"
        )
    return token_probs


def steps_are_turns(algorithm: AlgorithmConfig) -> bool:
    """Return whether the steps whose rewards the estimator reads are turns of responses, not parts of their text."""
    estimator = ESTIMATORS.get(algorithm.advantage.name)
    return algorithm.process.steps == "turns" or (estimator is not None and estimator.of_turns)


def step_places(steps: StepRewards) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the response of each step and the step's index in it, [K] int64 each."""
    sequence_K = torch.repeat_interleave(steps.offsets.diff())
    return sequence_K, torch.arange(len(sequence_K)) - steps.offsets[:-1][sequence_K]


def step_lengths(steps: StepRewards) -> torch.Tensor:
    """Return [K] int64 the tokens of each step: those after the end of the step before it."""
    _, place_K = step_places(steps)
    return steps.ends - torch.where(place_K == 0, -1, steps.ends.roll(1))


def one_step_each(rewards_S: torch.Tensor, lengths_S: torch.Tensor | None) -> StepRewards:
    """Return each response as one step with its reward."""
    if lengths_S is None:
        raise ConfigError("an advantage estimator of steps needs to know their tokens: pass lengths_S")
    return StepRewards(rewards_S, lengths_S - 1, torch.arange(len(rewards_S) + 1))
