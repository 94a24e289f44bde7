"""The processes of a run find each other: who is awaited is printed, and each cause of a failure is named."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from hwgrpo.errors import ConfigError, RunError, error_text, shown
from hwgrpo.support.launched_ranks import LaunchedRank, launched_rank, local_world_size, whole_number
from hwgrpo.support.waits import Wait, reported_wait
from hwgrpo.training.strategies import lost_ranks

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which torch.distributed finds the other processes; torchrun sets them."""
LISTED = 8
"""Ranks that a message lists; of more it gives the number."""
_runs = itertools.count()
"""Numbers of the process groups that this process joins."""


def is_launched() -> bool:
    """Return whether a launcher has set every variable that torch.distributed needs."""
    return all(os.environ.get(name) for name in RENDEZVOUS)


def join(comm_backend: str, timeout: timedelta | None) -> None:
    """Join the process group, under a prefix in the launcher's store that no earlier start or run used.

    When torchrun restarts failed processes it keeps its store, with addresses that no process listens at any more
    (torch 2.13). On one host all processes have the same restart count, which becomes the prefix. The same holds for a
    further run in the same processes, whose number is in the prefix.

    Args:
        comm_backend: backend of the process group.
        timeout: longest wait for the other ranks; None: torch's default.

    Raises:
        ConfigError: a variable of the launcher is wrong.
        RunError: rank 0 cannot be reached, or ranks are missing at the end of the wait.
    """
    launched = launched_rank()
    limit = timeout or default_pg_timeout
    store = dist.PrefixStore(f"run {next(_runs)}", _store_of_start(launched, limit))
    _await_ranks(store, launched, limit.total_seconds())
    dist.init_process_group(
        comm_backend, store=store, rank=launched.rank, world_size=launched.world_size, timeout=timeout
    )
    lost_ranks.watch(store, launched.rank, launched.world_size)


def host_store(timeout: timedelta) -> dist.Store | None:
    """Return a store that the ranks of this host share, before they join; None where there are no others to share with.

    Rank 0 serves it as long as it holds it, or the process group that it joins later.

    Args:
        timeout: longest wait for rank 0.

    Raises:
        ConfigError, RunError: as `join` does.
    """
    launched = launched_rank()
    if launched.local_world_size == 1 or dist.is_initialized() or not is_launched():
        return None
    first = launched.rank - launched.local_rank
    return dist.PrefixStore(f"host of rank {first}", _store_of_start(launched, timeout))


def _store_of_start(launched: LaunchedRank, limit: timedelta) -> dist.Store:
    one_host = local_world_size(0) == launched.world_size
    started_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_host else "0"
    return dist.PrefixStore(f"start {started_again}", _open_store(launched, limit))


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} (MASTER_ADDR, MASTER_PORT)"


def _open_store(launched: LaunchedRank, limit: timedelta) -> dist.Store:
    """Return the store of the run: torchrun's, or one that rank 0 serves."""
    if whole_number(os.environ, "MASTER_PORT", default=0) > 65535:
        raise ConfigError(f"MASTER_PORT={shown(os.environ['MASTER_PORT'])} in the environment must be at most 65535")
    address = _address()
    try:
        with reported_wait(f"rank 0 of {launched.world_size} at {address}", limit.total_seconds()):
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
                return next(rendezvous("env://", timeout=limit))[0]
            # as `rendezvous` does, but rank 0 does not wait within the call, where nobody sees for whom
            return dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                launched.world_size,
                is_master=launched.rank == 0,
                timeout=limit,
                wait_for_workers=False,
                multi_tenant=True,
            )
    except dist.DistError as error:
        doing = "serve the other ranks" if launched.rank == 0 else "reach rank 0"
        raise RunError(
            f"rank {launched.rank} of {launched.world_size} cannot {doing} at {address}: {error_text(error)}; set an "
            "address of rank 0's host that every host reaches, and a free port"
        ) from error


def _await_ranks(store: dist.Store, launched: LaunchedRank, seconds: float) -> None:
    """Wait until every rank has come to this point."""
    store.set(_arrival(launched.rank), "")
    missing = [rank for rank in range(launched.world_size) if rank != launched.rank]

    def awaited() -> str:
        ranks = ", ".join(map(str, missing)) if len(missing) <= LISTED else f"{len(missing)} ranks"
        return f"{'rank ' if len(missing) == 1 else ''}{ranks} of {launched.world_size} to join at {_address()}"

    wait = Wait(awaited, seconds)
    pause = 0.01
    try:
        while missing := [rank for rank in missing if not store.check([_arrival(rank)])]:
            if wait.over:
                raise RunError(
                    f"waited {seconds:g} s for {awaited()}: start every rank, or unset RANK and WORLD_SIZE to train in "
                    "one process; trainer.process_group_timeout is the time limit"
                )
            wait.pause(pause)
            pause = min(2 * pause, 1.0)
    except dist.DistError as error:
        raise RunError(f"rank 0 of {launched.world_size} ended while ranks were joining: see its output") from error


def _arrival(rank: int) -> str:
    return f"rank {rank} is here"
