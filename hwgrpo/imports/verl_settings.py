"""The settings of a verl run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hwgrpo.errors import ConfigError
from hwgrpo.imports.peer_settings import PeerSettings, fill
from hwgrpo.peer_tables.peer_names import PeerNames
from hwgrpo.peer_tables.verl_names import VERL

ACTOR = "actor_rollout_ref.actor."
MODEL = "actor_rollout_ref.model."
ROLLOUT = "actor_rollout_ref.rollout."


@dataclass
class VerlSettings(PeerSettings):
    """What a verl run is set to."""

    names: PeerNames = VERL
    devices_unknown: bool = False
    """Whether the script has a number of devices, and it is not known: verl's default is not that of the run."""

    def world_size(self) -> int:
        """Return the number of devices.

        Raises:
            ConfigError: there are none.
        """
        for key in ("trainer.n_gpus_per_node", "trainer.nnodes"):
            if self[key] < 1:
                raise ConfigError(f"{key}={self[key]} must be at least 1")
        return self["trainer.n_gpus_per_node"] * self["trainer.nnodes"]


def verl_settings(
    values: Mapping[str, Any], *, deleted: Iterable[str] = (), added: Collection[str] = ()
) -> VerlSettings:
    """Return settings under the names of the tables, checked.

    Args:
        values: key as it was written -> value.
        deleted: keys that `~key` deletes.
        added: keys that `+key` adds, which may be unknown.

    Raises:
        ConfigError: unknown keys, all of them, with the nearest known ones; or an illegal value, with the legal ones.
    """
    settings = VerlSettings()
    fill(settings, values, deleted=deleted, added=added)
    return settings
