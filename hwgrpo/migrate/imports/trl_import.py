"""Settings of a TRL run -> settings here."""

from __future__ import annotations

from hwgrpo.migrate.imports import trl_algorithm, trl_batches, trl_run
from hwgrpo.migrate.imports.import_result import Imported
from hwgrpo.migrate.imports.peer_import import Conversion, import_peer
from hwgrpo.migrate.imports.trl_settings import TrlSettings

CONVERSIONS: tuple[Conversion, ...] = (
    trl_batches.batches,
    trl_batches.length,
    trl_batches.optimizer,
    trl_batches.data,
    trl_batches.model,
    trl_batches.adapters,
    trl_algorithm.loss,
    trl_algorithm.advantage,
    trl_algorithm.kl,
    trl_algorithm.entropy,
    trl_algorithm.correction,
    trl_algorithm.rewards,
    trl_run.sampling,
    trl_run.agents,
    trl_run.engine,
    trl_run.devices,
    trl_run.validation,
    trl_run.saves,
    trl_run.logs,
)


def import_trl(v: TrlSettings) -> Imported:
    """Return the recipe of a TRL run.

    Raises:
        ConfigError: batch sizes that TRL refuses, too, or that have no counterpart.
    """
    return import_peer(v, CONVERSIONS)
