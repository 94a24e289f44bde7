"""Alternatives to a configuration that does not fit into memory, in the order in which a plan tries them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hwgrpo.config import Config
from hwgrpo.config.derived import longest_share, sequences_at_once
from hwgrpo.config.validate import check_strategy
from hwgrpo.errors import ConfigError
from hwgrpo.planning.planned_sharding import changed_settings, strategy_variants, variant_settings

MOST_DEVICES = 8192
"""Largest number of devices of an alternative."""
Settings = Mapping[str, Any]
EXACT: tuple[Settings, ...] = tuple(
    {
        "trainer.tokens_per_micro_batch": 8192,
        "rollout.max_sequences": sequences,
        "model.gradient_checkpointing": True,
        "trainer.offload": "optimizer",
    }
    for sequences in (256, 64, 16)
)
"""Sets of settings that save memory and keep the results, from the fastest on."""
ROUNDED: tuple[Settings, ...] = tuple(
    {**EXACT[-1], key: value} for key, value in (("optim.name", "adamw_8bit"), ("model.quantize", "nf4"))
)
"""Sets of settings that round optimizer states or the frozen base model, too."""

AWAKE: Settings = {"rollout.sleep_mode": "never"}


@dataclass(frozen=True)
class Alternative:
    """A configuration on some devices."""

    config: Config
    devices: int
    separate: bool
    """Rollout runs on separate devices."""
    text: str


def first_alternative(
    config: Config,
    devices: int,
    fits: Callable[[Alternative], bool],
    *,
    on_host: bool,
    separate: bool,
    sizes: Sequence[int] = (),
) -> str:
    """Return the first alternative that fits, as text.

    Args:
        config: settings that do not fit.
        devices: number of devices.
        fits: whether an alternative fits.
        on_host: the devices are the host, which has no other memory.
        separate: rollout runs on separate devices already.
        sizes: rollout tensor-parallel sizes of an engine on these devices, in ascending order.
    """

    def usable(each: Alternative) -> bool:
        try:
            check_strategy(each.config)
            return fits(each)
        except ConfigError:  # a run would reject the combination
            return False

    def with_settings(changes: Settings) -> Alternative:
        text = ", ".join(f"{key}={str(value).lower()}" for key, value in changes.items())
        return Alternative(changed_settings(config, changes), devices, separate, text)

    def settings(sets: tuple[Settings, ...]) -> Iterator[str]:
        """Yield the first set that fits, without settings that it fits without."""
        for each in sets:
            changes = {key: value for key, value in each.items() if _saves(config, key, value, on_host, separate)}
            if changes and usable(with_settings(changes)):
                for key in reversed(changes):
                    fewer = {name: value for name, value in changes.items() if name != key}
                    changes = fewer if fewer and usable(with_settings(fewer)) else changes
                yield with_settings(changes).text
                return

    def engine_awake() -> Iterator[str]:
        """Yield the engine that stays awake during updates: on some devices it cannot sleep with this model."""
        awake = with_settings(AWAKE)
        if config.rollout.sleep_mode == "auto" and not separate and usable(awake):
            yield awake.text

    def sharded_engines() -> Iterator[str]:
        for size in sizes:
            each = with_settings({"rollout.tensor_parallel_size": size})
            if size > config.rollout.tensor_parallel_size and usable(each):
                yield each.text

    def strategies(count: int, on_others: bool) -> Iterator[str]:
        more = f" on {count:,} devices" if count != devices else ""
        rollout = ", rollout on separate devices (--rollout separate)" if on_others and not separate else ""
        for name, kind in strategy_variants().items():
            if kind.one_process == (count == 1):
                changed = changed_settings(config, {"trainer": variant_settings(name, config.trainer)})
                each = Alternative(changed, count, on_others, f"{name}{more}{rollout}")
                if usable(each):
                    yield each.text

    counts = [devices]
    while counts[-1] * 2 <= min(MOST_DEVICES, config.trainer.prompts_per_step):
        counts.append(counts[-1] * 2)

    def texts() -> Iterator[str]:
        yield from sharded_engines()
        yield from engine_awake()
        yield from settings(EXACT)
        yield from strategies(devices, separate)
        yield from settings(ROUNDED)
        for count in (count for count in counts if config.trainer.prompts_per_step % count == 0):
            for on_others in (False, True)[separate:]:
                yield from strategies(count, on_others)

    return next(texts(), f"nothing on up to {counts[-1]:,} devices")


def _saves(config: Config, key: str, value: Any, on_host: bool, separate: bool) -> bool:
    """Return whether a setting of an alternative differs from the configuration's, and can save memory."""
    section, _, name = key.partition(".")
    current = getattr(getattr(config, section), name)
    if key == "trainer.tokens_per_micro_batch":
        return not on_host and longest_share(config) <= value < (current or value + 1)
    if key == "rollout.max_sequences":
        return not separate and value < sequences_at_once(config.rollout)
    return value != current and not (key == "trainer.offload" and on_host)
