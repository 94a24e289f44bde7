"""The settings of a verl run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hwgrpo.migrate.imports.conversion import Launch
from hwgrpo.migrate.imports.peer_settings import PeerSettings, fill
from hwgrpo.migrate.tables.peer_names import PeerNames
from hwgrpo.migrate.tables.verl_names import VERL

ACTOR = "actor_rollout_ref.actor."
MODEL = "actor_rollout_ref.model."
ROLLOUT = "actor_rollout_ref.rollout."
DEVICES = ("trainer.n_gpus_per_node", "trainer.nnodes")


@dataclass
class VerlSettings(PeerSettings):
    """What a verl run is set to."""

    names: PeerNames = VERL

    def launch(self) -> Launch:
        """Return the processes that verl starts.

        Raises:
            ConfigError: there are none.
        """
        return Launch(DEVICES, *map(self.count, DEVICES))


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
