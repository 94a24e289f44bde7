"""The sharding of a run's state by its strategy, or by one of `hwgrpo plan --strategy`."""

from __future__ import annotations

import dataclasses
from typing import Any

from hwgrpo.catalog import STRATEGIES
from hwgrpo.config.schema import Config, TrainerConfig
from hwgrpo.errors import choice_error
from hwgrpo.training.strategies.sharding import Sharding
from hwgrpo.training.strategies.strategy_kind import StrategyKind


def strategy_variants() -> dict[str, StrategyKind]:
    """Return name -> strategy of `hwgrpo plan --strategy`, from the simplest on; zeroN is DeepSpeed's stage N."""
    kinds = [STRATEGIES.load(name) for name in STRATEGIES.names()]
    kinds.sort(key=lambda kind: (not kind.one_process, len(kind.variants)))
    return {variant: kind for kind in kinds for variant in kind.variants}


def planned_sharding(name: str, devices: int, tensor: int = 1) -> Sharding:
    """Return how a variant of a strategy shards a run.

    Args:
        name: one of `strategy_variants`.
        devices: number of devices of the run.
        tensor: `trainer.tensor_parallel_size`.

    Raises:
        ConfigError: there is no such variant.
    """
    variants = strategy_variants()
    if name not in variants:
        raise choice_error("--strategy", name, tuple(variants))
    settings = {"tensor_parallel_size": tensor, **variants[name].variants[name]}
    return variants[name].sharding(_changed(TrainerConfig(), settings), devices)


def config_sharding(config: Config, world_size: int, auto: str | None = None) -> Sharding:
    """Return how the strategy of a configuration shards a run over its devices.

    Args:
        config: the run's settings.
        world_size: number of devices.
        auto: the strategy that `trainer.strategy=auto` means; None: the one without shards.
    """
    name = config.trainer.strategy
    if name == "auto":
        name = auto or replicated_strategy(world_size)
    return STRATEGIES.load(name).sharding(config.trainer, world_size)


def replicated_strategy(world_size: int) -> str:
    """Return the strategy without shards for a number of processes."""
    return "ddp" if world_size > 1 else "single"


def _changed(section: Any, settings: dict[str, Any]) -> Any:
    """Return a copy of a section with other values, by dotted keys."""
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        if rest:
            value = _changed(getattr(section, name), {rest: value})
        section = dataclasses.replace(section, **{name: value})
    return section
