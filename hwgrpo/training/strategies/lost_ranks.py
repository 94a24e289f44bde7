"""Which rank is lost, where a collective fails: each rank leaves in the run's store why it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

from hwgrpo.errors import RunError, error_text
from hwgrpo.support.waits import Wait

ANSWER_WITHIN = 15.0
"""Seconds that a rank waits for the others' reasons: a process that fails may first end its reward workers."""
SURVIVES = "a connection failed"
"""Reason of a rank that only noticed the loss of another."""


@dataclass(frozen=True)
class _Ranks:
    store: dist.Store
    rank: int
    world_size: int


_watched: list[_Ranks] = []
"""The ranks of this process's current run; empty where it did not join them itself."""


def watch(store: dist.Store, rank: int, world_size: int) -> None:
    """Name lost ranks of this run from now on.

    Args:
        store: the run's store, which all ranks reach.
        rank: rank of this process.
        world_size: number of ranks.
    """
    forget()
    _watched.append(_Ranks(store, rank, world_size))
    store.delete_key(_reason_of(rank))  # of this rank's earlier process


def forget() -> None:
    """Stop naming lost ranks: the run has ended."""
    _watched.clear()


@contextmanager
def name_lost_ranks() -> Iterator[None]:
    """Turn the failure of a connection between ranks, in the block, into an error that names the lost ranks.

    Any other error is left in the run's store as this rank's reason, and propagates.

    Raises:
        RunError: another rank failed, was killed or hangs.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        ranks = _watched[0] if _watched else None
        lost = is_connection_failure(error)
        if ranks is not None:
            with suppress(dist.DistError):  # rank 0 has ended, with the store
                ranks.store.set(_reason_of(ranks.rank), SURVIVES if lost else _reason(error))
        if not lost:
            raise
        raise RunError(_message(ranks, error)) from error


def is_connection_failure(error: BaseException) -> bool:
    """Return whether an error says that another rank cannot be reached: torch's own kinds, or gloo's by its text."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _message(ranks: _Ranks | None, error: BaseException) -> str:
    """Return what happened to the other ranks."""
    end = "start the run again: it continues from its newest checkpoint"
    if ranks is None:
        return f"the connection to another rank failed ({error_text(error)}): see the output of the other ranks; {end}"
    reasons = _reasons(ranks)
    failed = [f"rank {rank} failed with {why}" for rank, why in reasons.items() if why not in (None, SURVIVES)]
    silent = [rank for rank, why in reasons.items() if why is None]
    size = ranks.world_size
    if failed:
        return f"of {size} ranks, {'; '.join(failed)}; mend that, then {end}"
    if silent:
        names = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
        return (
            f"of {size} ranks, {names} ended without a reason or cannot be reached (killed, out of host memory, or the "
            f"host is lost): see the output there, and the kernel's log; {end}"
        )
    return f"all {size} ranks run, but the connection between them failed ({error_text(error)}); {end}"


def _reasons(ranks: _Ranks) -> dict[int, str | None]:
    """Return why each other rank ended; None for a rank that has not said it in time, or whose store is lost."""
    reasons: dict[int, str | None] = {rank: None for rank in range(ranks.world_size) if rank != ranks.rank}
    wait = Wait("the reasons of the ranks that ended", ANSWER_WITHIN)
    with suppress(dist.DistError):
        while not wait.over and None in reasons.values():
            for rank, why in reasons.items():
                if why is None and ranks.store.check([_reason_of(rank)]):
                    reasons[rank] = ranks.store.get(_reason_of(rank)).decode()
            wait.pause(0.05)
        return reasons
    # rank 0 held the store: it ended before this rank could read anything more
    return {0: None} if all(why is None for why in reasons.values()) else reasons


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error_text(error)}".removesuffix(": ")


def _reason_of(rank: int) -> str:
    return f"why rank {rank} ended"
