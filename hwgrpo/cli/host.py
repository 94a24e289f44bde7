"""The machine a command runs on: its backend, chosen and prepared before torch is imported."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from hwgrpo_backends import Backend, Decision, choose
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
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    check_world_size(config, world_size)
    choice = choose(config.backend.name)
    apply(choice.backend, "train")
    return Host(
        backend=choice.backend,
        decision=choice.decision,
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
    )
