"""Settings of `algorithm` that mean nothing together; which have no effect alone is declared in the schema."""

from __future__ import annotations

from hwgrpo.catalog import EXACT_KL
from hwgrpo.config.schema import AlgorithmConfig
from hwgrpo.errors import ConfigError


def check_algorithm(a: AlgorithmConfig) -> None:
    """Check pairs of settings of the algorithm.

    Raises:
        ConfigError: the first pair without meaning, with the remedy.
    """
    if a.kl.times_ratio and a.kl.estimator in ("k1+", "k3+"):
        raise ConfigError(
            f"algorithm.kl.times_ratio=true with algorithm.kl.estimator={a.kl.estimator!r}, which has the gradient of "
            "the KL already: the ratio would add the gradient of its value once more; use algorithm.kl.estimator="
            f"{a.kl.estimator.rstrip('+')}, or leave times_ratio out"
        )
    if a.kl.estimator == EXACT_KL and a.kl.in_reward:
        raise ConfigError(
            "algorithm.kl.in_reward=true with algorithm.kl.estimator=exact: the KL over the full vocabulary is "
            "computed beside the loss, after rewards are compared; use algorithm.kl.estimator=k1, which is unbiased "
            "there, or leave in_reward out"
        )
    if a.kl.estimator == EXACT_KL and a.kl.times_ratio:
        raise ConfigError(
            "algorithm.kl.times_ratio=true with algorithm.kl.estimator=exact: the KL over the full vocabulary has its "
            "gradient already, and the ratio of the sampled token is not a part of it; leave times_ratio out, or use "
            "algorithm.kl.estimator=k3"
        )
    if a.m2po_threshold is not None and a.old_logprobs == "rollout":
        raise ConfigError(
            f"algorithm.m2po_threshold={a.m2po_threshold} with algorithm.old_logprobs=rollout: it bounds the gap "
            "between old and rollout log-probs, which are then the same; leave one of them out"
        )
    if a.advantage.name == "grpo_passk" and a.advantage.singleton == "raw":
        raise ConfigError(
            "algorithm.advantage.singleton=raw with algorithm.advantage.name='grpo_passk': a group of one has no "
            "second best to be compared with; use zero or error"
        )
    loss = a.loss
    if loss.name == "ppo_clip" and loss.delta is not None and loss.dual_clip is not None:
        bound = max(loss.dual_clip, 1 + loss.clip_high)
        if loss.delta >= bound:
            raise ConfigError(
                f"algorithm.loss.delta={loss.delta:g} has no effect with algorithm.loss.dual_clip={loss.dual_clip:g}, "
                f"which binds first; use less than {bound:g}, or algorithm.loss.dual_clip=null"
            )
