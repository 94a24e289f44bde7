"""The start of a GRPO run after its settings are checked, for `hwgrpo train` and `hwgrpo.Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from hwgrpo.cli.backend_selection import Host
from hwgrpo.config import Config
from hwgrpo.errors import RunFinished
from hwgrpo.support.text import hide_secrets

if TYPE_CHECKING:
    from hwgrpo.observe.observer import Observer
    from hwgrpo.training.run_parts import Run


def start_run(
    config: Config,
    host: Host,
    *,
    allow_finished: bool = False,
    notes: Sequence[str] = (),
    observe: Callable[[Observer], Observer] = lambda observer: observer,
) -> Run:
    """Resolve the settings that depend on the devices, and make every part of a run.

    Args:
        config: checked settings; `auto` values are replaced in place.
        host: from `prepare_host`, which comes before torch is imported.
        allow_finished: a finished run of other settings or data is not an error.
        notes: further notes for the user.
        observe: as for `build_run`.

    Raises:
        ConfigError, DataError, RunError: as `resolve_engine`, `resolve_strategy` and `build_run` do.
        RunFinished: all steps are done, and all outputs exist.
    """
    from hwgrpo_backends.device import Device

    from hwgrpo.planning.engine_choice import resolve_engine
    from hwgrpo.planning.engine_share import planned_engine_share
    from hwgrpo.planning.strategy_choice import resolve_sequences, resolve_strategy
    from hwgrpo.rollout.vllm.installed_vllm import shared_answers
    from hwgrpo.training.setup import build_run
    from hwgrpo.training.strategies.lost_ranks import name_lost_ranks
    from hwgrpo.training.strategies.rendezvous import host_store

    planned = config, host.backend, host.world_size, Device(host.backend, host.local_rank)
    limit = timedelta(seconds=config.trainer.process_group_timeout)
    with shared_answers(lambda: host_store(limit)):  # up to the process group, which holds the store from then on
        with name_lost_ranks():
            notes = [*notes, *resolve_engine(*planned), *resolve_strategy(*planned)]
            notes += resolve_sequences(*planned)
        share, more = planned_engine_share(*planned)
        return build_run(
            config,
            host.backend,
            host.local_rank,
            host.local_world_size,
            allow_finished=allow_finished,
            notes=[*notes, *more],
            engine_share=share,
            observe=observe,
        )


def print_finished(finished: RunFinished) -> None:
    """Print that nothing is left to train, which is no failure where standard output cannot be written."""
    with suppress(OSError):
        print(hide_secrets(str(finished)))
