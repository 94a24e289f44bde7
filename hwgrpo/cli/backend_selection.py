"""Selection of the backend, and its environment variables, before torch is imported."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import NamedTuple

from hwgrpo_backends import Backend, BackendError, Decision, choose, registry
from hwgrpo_backends.decide import AUTO
from hwgrpo_backends.environment import apply, profile
from hwgrpo_backends.peaks import Chip

from hwgrpo.cli.chips import chosen_chips, closest_chip
from hwgrpo.config import Config
from hwgrpo.config.validate import check_world_size
from hwgrpo.support.launched_ranks import launched_rank

_reported: set[str] = set()
"""Variables that were set before torch was imported, or that a warning has named: a process warns of each once."""


@dataclass(frozen=True)
class Host:
    """Backend and ranks of this process."""

    backend: Backend
    decision: Decision
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


class PlannedHost(NamedTuple):
    """Backend and ranks that a run is planned for."""

    backend: Backend
    world_size: int
    local_world_size: int
    rank: int
    reason: str | None
    """Reason why this machine cannot run it; None where it can."""
    chip: Chip | None = None
    """The chip that stands for a device that is not here; None where one is, or the backend has no known chip."""


def planned_host(config: Config, chip: str | None = None) -> PlannedHost:
    """Return the backend and ranks for a plan, also for a backend without a device on this machine.

    Args:
        config: checked settings.
        chip: the chip to plan for, as `hwgrpo plan --chip` names it. None: the device here, or the first chip of the
            named backend.

    Raises:
        ConfigError: as `prepare_host` does.
        BackendError: no backend is named, and none can be selected.
    """
    launched = launched_rank()

    def planned(backend: Backend, reason: str | None, chip: Chip | None = None) -> PlannedHost:
        return PlannedHost(backend, launched.world_size, launched.local_world_size, launched.rank, reason, chip)

    if chip is not None:
        found, backend = closest_chip(chip, config)
        check_world_size(config, launched.world_size)
        return planned(backend, f"the plan is for {found.title} (--chip)", found)
    try:
        host = prepare_host(config)
    except BackendError as error:
        if config.backend.name == AUTO:
            raise
        backend = registry.get(config.backend.name)
        return planned(backend, str(error), chosen_chips(None, config)[0][0] if backend.chips else None)
    return planned(host.backend, None)


def prepare_host(config: Config) -> Host:
    """Select the backend and set its environment variables; call it before torch is imported.

    Raises:
        ConfigError: a variable of the launcher is wrong, or the batch sizes or the strategy do not fit the ranks.
        BackendError: no backend can be selected; the message has the reason and the remedy.
    """
    launched = launched_rank()
    check_world_size(config, launched.world_size)
    selection = choose(config.backend.name)
    settings = profile(selection.backend, "train", deterministic=config.trainer.deterministic)
    late = {
        each.name: each.value
        for each in settings
        if os.environ.get(each.name) != each.value and each.name not in _reported
    }
    _reported.update(late)
    if late and "torch" in sys.modules and launched.rank == 0:
        exports = " ".join(f"{name}={value}" for name, value in late.items())
        print(
            f"hwgrpo: warning: torch is already imported and may ignore {', '.join(late)}, which the backend sets; "
            f"export {exports} before you start Python, or import hwgrpo.trl before torch, transformers and peft",
            file=sys.stderr,
        )
    apply(selection.backend, "train", deterministic=config.trainer.deterministic)
    return Host(
        backend=selection.backend,
        decision=selection.decision,
        **launched._asdict(),
    )
