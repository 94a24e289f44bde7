"""The sharding of a run's state by its strategy, or by one of `hwgrpo plan --strategy`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hwgrpo.catalog import STRATEGIES
from hwgrpo.config.schema import TrainerConfig
from hwgrpo.errors import choice_error
from hwgrpo.training.strategies.sharding import Sharding
from hwgrpo.training.strategies.strategy_kind import StrategyKind


def strategy_variants() -> dict[str, StrategyKind]:
    """Return name -> strategy of `hwgrpo plan --strategy`, from the simplest on; zeroN is DeepSpeed's stage N."""
    kinds = [STRATEGIES.load(name) for name in STRATEGIES.names()]
    kinds.sort(key=lambda kind: (not kind.one_process, len(kind.variants)))
    return {variant: kind for kind in kinds for variant in kind.variants}


def variant_settings(name: str, trainer: TrainerConfig) -> TrainerConfig:
    """Return settings with the strategy of a variant, all others unchanged.

    Args:
        name: one of `strategy_variants`.
        trainer: the settings.

    Raises:
        ConfigError: there is no such variant.
    """
    variants = strategy_variants()
    if name not in variants:
        raise choice_error("--strategy", name, tuple(variants))
    kind = variants[name]
    strategy = next(each for each in STRATEGIES.names() if STRATEGIES.load(each) is kind)
    return changed_settings(trainer, {"strategy": strategy, **kind.variants[name]})


def planned_sharding(name: str, devices: int, tensor: int = 1) -> Sharding:
    """Return how a variant of a strategy with default settings shards a run, for a tensor-parallel size."""
    return sharding_of(variant_settings(name, TrainerConfig(tensor_parallel_size=tensor)), devices)


def sharding_of(trainer: TrainerConfig, devices: int) -> Sharding:
    """Return how a strategy with these settings shards a run; `auto` is the one without shards."""
    return strategy_kind(trainer, devices).sharding(trainer, devices)


def strategy_kind(trainer: TrainerConfig, devices: int) -> StrategyKind:
    """Return the strategy of these settings; `auto` is the one without shards."""
    name = trainer.strategy
    return STRATEGIES.load(replicated_strategy(devices) if name == "auto" else name)


def resolve_auto(trainer: TrainerConfig, devices: int, fits: Callable[[TrainerConfig], bool]) -> TrainerConfig:
    """Return settings with values for those at `auto`.

    The strategy is the one without shards if that fits or on one device, else fsdp2; its own settings are the fastest
    that fit, else those of least memory.

    Args:
        trainer: the settings.
        devices: number of devices.
        fits: whether a device has the memory for such settings.
    """
    if trainer.strategy == "auto":
        replicated = dataclasses.replace(trainer, strategy=replicated_strategy(devices))
        sharded = dataclasses.replace(trainer, strategy="fsdp2")
        trainer = replicated if devices == 1 or fits(replicated) else sharded
    choices = [changed_settings(trainer, each) for each in strategy_kind(trainer, devices).alternatives(trainer)]
    return next((choice for choice in choices[:-1] if fits(choice)), choices[-1])


def replicated_strategy(world_size: int) -> str:
    """Return the strategy without shards for a number of processes."""
    return "ddp" if world_size > 1 else "single"


def changed_settings(section: Any, settings: Mapping[str, Any]) -> Any:
    """Return a copy of a section with other values, by dotted keys; which settings a recipe sets stays known."""
    section = copy.copy(section)
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        setattr(section, name, changed_settings(getattr(section, name), {rest: value}) if rest else value)
    return section
