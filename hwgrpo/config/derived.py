"""Values that follow from several settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hwgrpo.catalog import EXACT_KL, KL_ESTIMATORS
from hwgrpo.config.schema import KlConfig, RolloutConfig, Settings
from hwgrpo.values import Sampling

MOST_SEQUENCES = 1024
"""Most sequences that are decoded at once where their number is not set."""
ASSUMED_SEQUENCES = 256
"""Sequences decoded at once by which a plan chooses what comes before their number, such as the strategy."""


def prompts_per_update(config: Settings) -> int:
    """Return the prompts per optimizer update, over all ranks."""
    return config.trainer.prompts_per_update or config.trainer.prompts_per_step


def ranks_per_sequence(config: Settings) -> int:
    """Return how many ranks go through a sequence together, a part of its tokens each."""
    return max(config.trainer.sequence_parallel_size, config.trainer.tensor_parallel_size)


def sequences_at_once(rollout: RolloutConfig) -> int:
    """Return how many sequences the engine decodes at once; for the local one, before the plan has chosen, a guess."""
    if rollout.max_sequences is not None:
        return rollout.max_sequences
    return ASSUMED_SEQUENCES if rollout.engine in ("auto", "local") else MOST_SEQUENCES


def sharing_setting(config: Settings) -> str:
    """Return the setting by which ranks share sequences, as it stands."""
    name = "tensor" if config.trainer.tensor_parallel_size > 1 else "sequence"
    return f"trainer.{name}_parallel_size={ranks_per_sequence(config)}"


def longest_share(config: Settings) -> int:
    """Return the most tokens of one sequence that a device has to hold in a pass."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return -(-longest // ranks_per_sequence(config))


def planned_steps(config: Settings, prompts: int) -> int:
    """Return the total number of steps.

    Args:
        config: checked settings.
        prompts: how many the training data has.
    """
    t = config.trainer
    return t.max_steps or max(1, t.epochs * prompts // t.prompts_per_step)


def largest_kl(kl: KlConfig) -> float | None:
    """Return the largest KL to the reference that a token can show; None: there is no bound."""
    return kl.output_clamp if kl.estimator in KL_ESTIMATORS.readers("output_clamp") else None


def has_exact_kl(config: Settings) -> bool:
    """Return whether each pass of an update runs the reference model, for the KL over the full vocabulary."""
    return config.algorithm.kl.coef > 0 and config.algorithm.kl.estimator == EXACT_KL


def temperature_at(config: Settings, step: int, total_steps: int) -> float:
    """Return the temperature of a step, 1 <= step <= total_steps."""
    r = config.rollout
    if r.final_temperature is None:
        return r.temperature
    return r.temperature + (r.final_temperature - r.temperature) * (step - 1) / max(1, total_steps - 1)


def sampling_by_step(config: Settings, total_steps: int) -> Callable[[int], Sampling]:
    """Return how the responses of a step are drawn, as a function of the step."""
    sampling = sampling_of(config)
    return lambda step: replace(sampling, temperature=temperature_at(config, step, total_steps))


def sampling_of(config: Settings) -> Sampling:
    """Return how responses are drawn in training, at `rollout.temperature`.

    Raises:
        ConfigError: a `rollout` setting is out of range.
    """
    r = config.rollout
    return Sampling(
        n=r.n,
        max_response_tokens=r.max_response_tokens,
        temperature=r.temperature,
        top_k=r.top_k,
        top_p=r.top_p,
        min_p=r.min_p,
        stop=tuple(r.stop),
        stop_token_ids=tuple(r.stop_token_ids),
        skip_special_tokens=r.skip_special_tokens,
        seed=config.trainer.seed,
        group_timeout=r.group_timeout,
    )


def validation_sampling_of(config: Settings) -> Sampling:
    """Return how the sampled responses of validations are drawn; n is that of training.

    Raises:
        ConfigError: as `sampling_of` does.
    """
    own = config.trainer.validation_sampling
    settings = {"temperature": own.temperature, "top_k": own.top_k, "top_p": own.top_p}
    return replace(sampling_of(config), **{key: value for key, value in settings.items() if value is not None})
