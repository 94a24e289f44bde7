"""Several ranks of one run, forked from this process so that they need not import anything anew."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import hwgrpo.training.strategies.ddp  # what children would import, each anew
import hwgrpo.training.strategies.fsdp2  # noqa: F401


def forked(ranks: int, body: Callable[[int], Any], *, limit_s: float = 240) -> list[int]:
    """Run `body(rank)` in a process for each rank; return their wait statuses as `runs.forked` does.

    Ranks that are not done after `limit_s` seconds are killed, which their statuses show.
    """
    torch.set_num_threads(1)
    store, port = _start_store()
    children = [_start(rank, ranks, port, body) for rank in range(ranks)]
    statuses: dict[int, int] = {}
    end = time.monotonic() + limit_s
    while len(statuses) < ranks:
        for child in [child for child in children if child not in statuses]:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    return [statuses[child] for child in children]


def _start_store() -> tuple[int, int]:
    """Start a process that holds the ranks' store, as torchrun's does; return its number and the store's port.

    A store that the first rank held would end with that rank while others still read it.
    """
    read, write = os.pipe()
    tests = os.getpid()
    child = os.fork()
    if child:
        os.close(write)
        with open(read) as pipe:
            return child, int(pipe.readline())
    try:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, f"{store.port}\n".encode())
        while os.getppid() == tests:
            time.sleep(1)
    finally:
        os._exit(0)


def _start(rank: int, ranks: int, port: int, body: Callable[[int], Any]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        # what torchrun sets
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        body(rank)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)
    os._exit(0)
