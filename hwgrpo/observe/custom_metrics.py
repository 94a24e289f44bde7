"""Metrics of the user's own, computed from each step's responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hwgrpo.catalog import METRICS
from hwgrpo.config.bound_arguments import bind_arguments
from hwgrpo.errors import ConfigError, RunError, shown
from hwgrpo.own_copies import own_copy
from hwgrpo.user_code import arguments_of, describe_error, raised_by_user_code

if TYPE_CHECKING:
    import torch

    from hwgrpo.config.schema import ObserveConfig
    from hwgrpo.values import Completions, PromptBatch, Rewards


class CustomMetrics:
    """The functions of `observe.metrics`.

    Args:
        config: the `observe` settings.

    Raises:
        ConfigError: a function cannot be imported, or does not accept its arguments.
    """

    def __init__(self, config: ObserveConfig) -> None:
        self._functions: dict[str, Callable[..., Mapping[str, Any]]] = {
            name: bind_arguments(METRICS.load(name), arguments_of(name, config.kwargs), 4, "observe.kwargs")
            for name in config.metrics
        }

    def __bool__(self) -> bool:
        return bool(self._functions)

    def measure(
        self, prompts: PromptBatch, completions: Completions, rewards: Rewards, advantages_S: torch.Tensor
    ) -> dict[str, list[float]]:
        """Return name -> this rank's S values, one per response; NaN where a metric does not apply to a response.

        Raises:
            RunError: a function failed, or returned something else.
        """
        values: dict[str, list[float]] = {}
        if len(completions) == 0:
            return values  # all groups were dropped
        from hwgrpo.support.torch_settings import kept_torch_settings  # torch is imported by now

        given = (prompts, completions, rewards, advantages_S)
        for setting, function in self._functions.items():
            try:
                with kept_torch_settings(f"observe.metrics={setting!r}"):
                    measured = {
                        name: [float(value) for value in each]
                        for name, each in dict(function(*map(own_copy, given))).items()
                    }
            except BaseException as error:  # a function that exits must not pass for the end of the run
                if not raised_by_user_code(error):
                    raise
                raise RunError(f"observe.metrics={setting!r}: {describe_error(error)}") from error
            for name, each in measured.items():
                if len(each) != len(completions):
                    raise RunError(
                        f"observe.metrics={setting!r} returned {len(each)} values of {shown(name)} for "
                        f"{len(completions)} responses: return one per response, NaN where it does not apply"
                    )
            values |= measured
        return values


def over_ranks(ranks: Sequence[Mapping[str, Sequence[float]]], known: Mapping[str, float]) -> dict[str, float]:
    """Return mean, max and min of each metric over the responses of all ranks.

    Args:
        ranks: what each rank measured, in rank order.
        known: the product's own metrics of the step, whose names are reserved.

    Raises:
        ConfigError: a metric has the name of one of them.
    """
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        values = [value for rank in ranks for value in rank.get(name, ()) if not math.isnan(value)]
        if values:
            metrics |= {f"{name}/mean": fmean(values), f"{name}/max": max(values), f"{name}/min": min(values)}
    for name in metrics:
        if name in known:
            raise ConfigError(f"observe.metrics: {name} is a metric of every run: give yours another name")
    return metrics
