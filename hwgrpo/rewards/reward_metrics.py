"""Metrics of rewards with state: what they report after each step, over ranks, and running totals of their counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from hwgrpo.errors import RunError, shown
from hwgrpo.rewards.processes.messages import number_of
from hwgrpo.rewards.processes.reward_process import Reward
from hwgrpo.user_code import describe_error, raised_by_user_code

Measured = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Function -> "metrics" or "counts" -> name -> this rank's value."""
KINDS = ("metrics", "counts")
"""Optional methods of a reward's class, without arguments, that return numbers by name: `metrics()` is averaged over
ranks; `counts()`, what was used since the last call, is summed over them and has a running total."""


class RewardMetrics:
    """Reads the metrics of a run's rewards.

    Args:
        functions: the run's reward functions; those without such methods have no metrics.
    """

    def __init__(self, functions: Sequence[Reward]) -> None:
        self._methods: dict[str, dict[str, Callable[[], Any]]] = {}
        for function in functions:
            reward = getattr(function, "call", None)
            methods = {kind: getattr(reward, kind) for kind in KINDS if callable(getattr(reward, kind, None))}
            if methods:
                self._methods[function.name] = methods
        self._totals: dict[str, dict[str, float]] = {}

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the functions that have metrics."""
        return tuple(self._methods)

    def __bool__(self) -> bool:
        return bool(self._methods)

    def read(self) -> Measured:
        """Return this rank's values since the last call.

        Raises:
            RunError: a method failed, or returned something else than finite numbers by name.
        """
        return {
            name: {kind: _numbers(f"reward {name}: {kind}()", method) for kind, method in methods.items()}
            for name, methods in self._methods.items()
        }

    def over_ranks(self, ranks: Sequence[Measured]) -> dict[str, float]:
        """Add the counts to the totals, and return the metrics `reward/<function>/<name>`.

        Args:
            ranks: what each rank read, in rank order.
        """
        metrics: dict[str, float] = {}
        for function in self._methods:
            averaged, counted = (_by_name([rank[function].get(kind, {}) for rank in ranks]) for kind in KINDS)
            metrics |= {f"reward/{function}/{name}": fmean(values) for name, values in averaged.items()}
            totals = self._totals.setdefault(function, {})
            for name, values in counted.items():
                totals[name] = totals.get(name, 0.0) + sum(values)
                metrics[f"reward/{function}/{name}"] = sum(values)
                metrics[f"reward/{function}/total_{name}"] = totals[name]
        return metrics

    def state(self) -> dict[str, dict[str, float]]:
        """Return the totals for a checkpoint; they are equal on all ranks."""
        return {function: dict(totals) for function, totals in self._totals.items()}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continue from the totals of a checkpoint; those of functions that the run no longer has are dropped."""
        self._totals = {function: dict(totals) for function, totals in state.items() if function in self._methods}


def _by_name(ranks: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: [rank[name] for rank in ranks if name in rank] for name in names}


def _numbers(where: str, method: Callable[[], Any]) -> dict[str, float]:
    try:
        values = dict(method())
    except BaseException as error:  # a method that exits must not pass for the end of the run
        if not raised_by_user_code(error):
            raise
        raise RunError(f"{where} raised {describe_error(error)}") from error
    numbers = {str(name): number_of(value) for name, value in values.items()}
    for name, number in numbers.items():
        if number is None or not math.isfinite(number):  # a total would stay NaN
            raise RunError(f"{where} must return finite numbers by name; {name!r} is {shown(values[name])}")
    return {name: number for name, number in numbers.items() if number is not None}
