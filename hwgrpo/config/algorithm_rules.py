"""Settings of `algorithm` that mean nothing together; which have no effect alone is declared in the schema."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hwgrpo.catalog import (
    ADVANTAGES,
    CORRECTIONS,
    ESTIMATORS,
    EXACT_KL,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    REJECTIONS,
    SAFE_LOG_RATIO,
)
from hwgrpo.config.bound_arguments import check_arguments
from hwgrpo.config.schema import AlgorithmConfig, KlConfig, LossConfig
from hwgrpo.errors import ConfigError, shown
from hwgrpo.registry import Registry
from hwgrpo.user_code import names_a_file


def check_algorithm(a: AlgorithmConfig) -> None:
    """Check pairs of settings of the algorithm.

    Raises:
        ConfigError: the first pair without meaning, with the remedy.
    """
    _check_numbers("algorithm.advantage", a.advantage.name, a.advantage.kwargs)
    _check_numbers("algorithm.loss", a.loss.name, a.loss.kwargs)
    _check_loss(a.loss)
    _check_kl(a.kl, a.advantage.name)
    _check_correction(a)
    low, high = a.entropy_coef_min, a.entropy_coef_max
    if a.entropy_target is not None and not low <= a.entropy_coef <= high:
        raise ConfigError(
            f"algorithm.entropy_coef={a.entropy_coef:g} is not between entropy_coef_min={low:g} and "
            f"entropy_coef_max={high:g}, which bound it with algorithm.entropy_target; change one of them"
        )
    if a.advantage.name == "grpo_passk" and a.advantage.singleton == "raw":
        raise ConfigError(
            "algorithm.advantage.singleton=raw with algorithm.advantage.name='grpo_passk': a group of one has no "
            "second best to be compared with; use zero or error"
        )


def check_declared(a: AlgorithmConfig) -> None:
    """Check the arguments of registered functions; a file's function is checked when it is loaded.

    This imports torch, so call it after the backend has set its environment variables.

    Raises:
        ConfigError: the first one outside of what the signature of its function declares.
    """
    _check_declared("algorithm.advantage", ADVANTAGES, a.advantage.name, a.advantage.kwargs)
    _check_declared("algorithm.loss", POLICY_LOSSES, a.loss.name, a.loss.kwargs)
    _check_declared("algorithm.kl", KL_ESTIMATORS, a.kl.estimator, a.kl.kwargs)
    _check_declared("algorithm.correction", CORRECTIONS, a.correction.name, a.correction.kwargs)


def _check_numbers(section: str, name: str, kwargs: Mapping[str, Any]) -> None:
    """Check that keyword arguments of a built-in function are finite numbers."""
    for argument, value in kwargs.items():
        if not names_a_file(name) and not (type(value) in (int, float) and math.isfinite(value)):
            raise ConfigError(
                f"{section}.kwargs.{argument}={shown(value)} with {section}.name={name!r}: its arguments are numbers; "
                "use a finite number"
            )


def _check_declared(section: str, registry: Registry, name: str, kwargs: Mapping[str, Any]) -> None:
    if kwargs and name in registry:
        function = registry.load(name)
        check_arguments(getattr(function, "function", function), kwargs, f"{section}.kwargs")


def _check_loss(loss: LossConfig) -> None:
    if loss.clip_high < 0 and loss.name != "cispo":
        raise ConfigError(
            f"algorithm.loss.clip_high={loss.clip_high} with algorithm.loss.name={loss.name!r} clips "
            "unchanged ratios, too: only cispo may; use at least 0"
        )
    if loss.name == "ppo_clip" and loss.delta is not None and loss.dual_clip is not None:
        bound = max(loss.dual_clip, 1 + loss.clip_high)
        if loss.delta >= bound:
            raise ConfigError(
                f"algorithm.loss.delta={loss.delta:g} has no effect with algorithm.loss.dual_clip={loss.dual_clip:g}, "
                f"which binds first; use less than {bound:g}, or algorithm.loss.dual_clip=null"
            )


def _check_kl(kl: KlConfig, estimator: str) -> None:
    no_kl = ESTIMATORS[estimator].no_kl if estimator in ESTIMATORS else None
    if kl.in_reward and no_kl is not None:
        raise ConfigError(
            f"algorithm.kl.in_reward=true with algorithm.advantage.name={estimator!r}: it {no_kl}; leave in_reward "
            "out (the KL is then in the loss), or use another estimator, e.g. grpo"
        )
    if kl.times_ratio and kl.estimator in ("k1+", "k3+"):
        raise ConfigError(
            f"algorithm.kl.times_ratio=true with algorithm.kl.estimator={kl.estimator!r}, which has the gradient of "
            "the KL already: the ratio would add the gradient of its value once more; use algorithm.kl.estimator="
            f"{kl.estimator.rstrip('+')}, or leave times_ratio out"
        )
    if kl.estimator == EXACT_KL and kl.in_reward:
        raise ConfigError(
            "algorithm.kl.in_reward=true with algorithm.kl.estimator=exact: the KL over the full vocabulary is "
            "computed beside the loss, after rewards are compared; use algorithm.kl.estimator=k1, which is unbiased "
            "there, or leave in_reward out"
        )
    if kl.estimator == EXACT_KL and kl.times_ratio:
        raise ConfigError(
            "algorithm.kl.times_ratio=true with algorithm.kl.estimator=exact: the KL over the full vocabulary has its "
            "gradient already, and the ratio of the sampled token is not a part of it; leave times_ratio out, or use "
            "algorithm.kl.estimator=k3"
        )


def _check_correction(a: AlgorithmConfig) -> None:
    correction = a.correction
    if correction.low is not None and correction.high is not None and correction.low >= correction.high:
        raise ConfigError(
            f"algorithm.correction.low={correction.low} must be below algorithm.correction.high={correction.high}"
        )
    if correction.name != "none" and correction.low is None and correction.high is None:
        raise ConfigError(
            f"algorithm.correction.name={correction.name!r} needs a bound: set correction.low, high or both"
        )
    _check_rejection(correction.reject)
    if a.old_logprobs == "rollout" and (correction.name != "none" or correction.reject):
        raise ConfigError(
            "algorithm.old_logprobs=rollout: the ratio is against the rollout engine's log-probs, which leaves no gap "
            f"to correct; leave out algorithm.correction.name={correction.name!r} and reject={correction.reject}"
        )
    if a.m2po_threshold is not None and a.old_logprobs == "rollout":
        raise ConfigError(
            f"algorithm.m2po_threshold={a.m2po_threshold} with algorithm.old_logprobs=rollout: it bounds the gap "
            "between old and rollout log-probs, which are then the same; leave one of them out"
        )


def _check_rejection(reject: Mapping[str, Any]) -> None:
    """Check the setting `algorithm.correction.reject`.

    Raises:
        ConfigError: an unknown statistic, or bounds that it does not take.
    """
    for name, bounds in reject.items():
        key = f"algorithm.correction.reject.{name}={bounds!r}"
        if name not in REJECTIONS:
            raise ConfigError(f"{key}: there is no such statistic; use one of: {', '.join(REJECTIONS)}")
        numbers = bounds if isinstance(bounds, list | tuple) else [bounds]
        right = all(type(each) in (int, float) and 0 < each < math.inf for each in numbers)
        if name.endswith("k1"):
            if not (right and len(numbers) == 2 and numbers[0] < numbers[1]):
                raise ConfigError(
                    f"{key}: give the least and the largest ratio of the engine's probability to the trainer's, e.g. "
                    "[0.5, 2.0]"
                )
            if not numbers[0] <= 1 <= numbers[1]:
                raise ConfigError(f"{key} leaves out what engine and trainer agree on; use bounds below and above 1")
        elif name == "veto":
            if not right or numbers is bounds or numbers[0] >= 1:
                raise ConfigError(f"{key}: give one number above 0 and below 1, e.g. 1e-4")
        elif not right or numbers is bounds:
            raise ConfigError(f"{key}: give one number above 0, e.g. 0.01")
        most = _largest_statistic(name)
        if most is not None and max(numbers) >= most and (len(numbers) == 1 or numbers[0] <= 1 / most):
            raise ConfigError(
                f"{key} leaves nothing out: log-ratios are kept within plus or minus {SAFE_LOG_RATIO:g}, so that it is "
                f"{f'between {1 / most:.6g} and' if len(numbers) == 2 else 'at most'} {most:.6g}; use "
                f"{'closer bounds' if len(numbers) == 2 else 'less'}"
            )


def _largest_statistic(name: str) -> float | None:
    """Return the largest value that a statistic of `algorithm.correction.reject` can have; None without a bound."""
    over, _, k = name.rpartition("_")
    if over == "seq_sum" or name == "veto":
        return None
    x = SAFE_LOG_RATIO
    return {"k1": math.exp(x), "k2": x * x / 2, "k3": math.expm1(x) - x}[k]
