"""The machine a command runs on: its backend, chosen and prepared before torch is imported."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import NamedTuple

from hwgrpo_backends import Backend, BackendError, Decision, choose, registry
from hwgrpo_backends.decide import AUTO
from hwgrpo_backends.environment import apply

from hwgrpo.config import Config
from hwgrpo.config.validate import check_world_size


@dataclass(frozen=True)
class Host:
    """What the launcher and the machine decided."""

    backend: Backend
    decision: Decision
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


class Place(NamedTuple):
    """Where a run is planned for."""

    backend: Backend
    world_size: int
    rank: int
    obstacle: str | None
    """Why this machine cannot run it; None where it can."""


def planned_place(config: Config) -> Place:
    """Return what `prepare_host` does as far as a plan needs it, also for a backend that is not on this machine.

    Raises:
        ConfigError: as `prepare_host` does.
        BackendError: no backend is named, and none can be chosen.
    """
    try:
        host = prepare_host(config)
    except BackendError as error:
        if config.backend.name == AUTO:
            raise
        return Place(registry.get(config.backend.name), *_world(), str(error))
    return Place(host.backend, host.world_size, host.rank, None)


def prepare_host(config: Config) -> Host:
    """Choose the backend and put its environment in force; call it before torch is imported.

    Raises:
        ConfigError: the batch sizes or the strategy do not fit the number of ranks.
        BackendError: no backend can be chosen; the message says why and what to do.
    """
    if "torch" in sys.modules:
        print(
            "hwgrpo: warning: torch is imported already, so variables of the backend may come too late", file=sys.stderr
        )
    world_size, rank = _world()
    check_world_size(config, world_size)
    choice = choose(config.backend.name)
    apply(choice.backend, "train", deterministic=config.trainer.deterministic)
    return Host(
        backend=choice.backend,
        decision=choice.decision,
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
    )


def _world() -> tuple[int, int]:
    """Return how many processes the run has, and which of them this is, as the launcher says."""
    return int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
