"""The chips that a plan is for: rows of the backends' tables, or described by the user. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hwgrpo_backends import Backend, registry
from hwgrpo_backends.decide import AUTO
from hwgrpo_backends.peaks import GIB, Chip, T

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError, choice_error

DEFAULT_CHIPS = ("H100 SXM", "H200 SXM", "MI300X", "910B3", "910C die")
"""Chips shown without `--chip` where the recipe names no backend."""


def chosen_chips(wanted: Sequence[str] | None, config: Config) -> list[tuple[Chip, Backend]]:
    """Return the named chips, or a few of the backend's, each with its backend.

    Raises:
        ConfigError: a name matches no chip, or a description is malformed.
    """
    backends = registry.load_all().backends
    name = config.backend.name
    family = backends.get(name)
    table = {
        chip.title: (chip, backend)
        for backend in backends.values()
        for chip in backend.chips
        if name in (AUTO, backend.name) or wanted
    }
    if not wanted:
        names = [title for title in DEFAULT_CHIPS if title in table] or list(table)
        if not names:
            raise ConfigError(
                f"backend {name!r} has no known chip: describe one, --chip mine=TFLOP/s,GB/s,GiB (matrix rate in the "
                "compute dtype, memory bandwidth, memory)"
            )
        return [table[title] for title in names]
    own = family or next(backend for backend in backends.values() if not backend.is_host)
    chips: list[tuple[Chip, Backend]] = []
    for option in wanted:
        if "=" in option:
            chips.append((_parse_chip(option), own))
            continue
        exact = [title for title in table if title.lower() == option.lower()]
        matches = exact or [title for title in table if option.lower() in title.lower()]
        if not matches:
            raise choice_error("--chip", option, table)
        chips += [table[title] for title in matches]
    return chips


def closest_chip(wanted: str, config: Config) -> tuple[Chip, Backend]:
    """Return the chip that a name means, with its backend: of several that match, the one that plans show by default.

    Raises:
        ConfigError: as `chosen_chips` does.
    """
    return min(chosen_chips([wanted], config), key=lambda found: found[0].title not in DEFAULT_CHIPS)


def _parse_chip(option: str) -> Chip:
    name, _, numbers = option.partition("=")
    try:
        flops, bandwidth, memory = (float(number) for number in numbers.split(","))
    except ValueError:
        flops = bandwidth = memory = 0.0
    if not (name and min(flops, bandwidth, memory) > 0 and max(flops, bandwidth, memory) < math.inf):
        raise ConfigError(f"--chip {option!r}: use name=TFLOP/s,GB/s,GiB, three numbers above 0, e.g. mine=989,3350,80")
    names: tuple[str, ...] = ("bfloat16", "float16", "float32")
    rates: dict[str, float] = dict.fromkeys(names, flops * T)
    return Chip(arch="", name=name, flops=rates, bandwidth=bandwidth * 1e9, source="--chip", memory=memory * GIB)
