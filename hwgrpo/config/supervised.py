"""The settings that supervised training uses."""

from __future__ import annotations

import copy

from hwgrpo.config.load import Config
from hwgrpo.config.schema import (
    AdvantageConfig,
    AlgorithmConfig,
    LossConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
)


def supervised_settings(config: Config) -> Config:
    """Return a copy of a recipe's settings for supervised training, which samples and scores nothing.

    The loss is `gpg`, which with an advantage of 1 is the negative log-prob, at temperature 1. Of `rollout` only
    `max_response_tokens` is used, with one response per prompt, of `reward`, `algorithm` and `data.difficulty` nothing.
    """
    settings = copy.deepcopy(config)
    settings.rollout = RolloutConfig(max_response_tokens=config.rollout.max_response_tokens, n=1)
    settings.reward = RewardConfig(functions=[RewardFunctionConfig(name="exact_match")])  # never called
    settings.algorithm = AlgorithmConfig(loss=LossConfig(name="gpg"), advantage=AdvantageConfig(singleton="raw"))
    settings.data.difficulty = type(config.data.difficulty)()
    settings.trainer.epochs_per_batch = 1
    return settings
