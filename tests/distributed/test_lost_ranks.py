"""Processes that find each other, or do not, and ranks that are lost: who is awaited or lost is named."""

import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from hwgrpo.errors import ConfigError, RewardError, RunError
from hwgrpo.support import waits
from hwgrpo.training.strategies import lost_ranks, rendezvous
from hwgrpo.training.strategies.ddp import Ddp
from hwgrpo.training.strategies.lost_ranks import is_connection_failure, name_lost_ranks
from hwgrpo.training.strategies.process_group import Processes
from tests.support.processes.ranks import forked

ANSWER_WITHIN = 3.0


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set what a launcher of two ranks sets for rank 0."""
    port = str(_free_port())
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return monkeypatch


def test_a_rank_that_does_not_come_is_awaited_aloud_and_named(
    launched: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    launched.setattr(waits, "FIRST_REPORT", 0.1)
    with pytest.raises(RunError, match=r"rank 1 of 2 to join at 127\.0\.0\.1:\d+.*unset RANK and WORLD_SIZE"):
        rendezvous.join("gloo", timedelta(seconds=0.5))
    assert "hwgrpo: waiting for rank 1 of 2 to join at 127.0.0.1:" in capsys.readouterr().err
    assert not dist.is_initialized()


def test_of_many_missing_ranks_the_number_is_given(launched: pytest.MonkeyPatch):
    launched.setenv("WORLD_SIZE", "64")
    with pytest.raises(RunError, match="63 ranks of 64 to join"):
        rendezvous.join("gloo", timedelta(seconds=0.2))


def test_a_call_that_waits_by_itself_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waits, "FIRST_REPORT", 0.0)
    with waits.reported_wait("rank 0", 9.0):
        time.sleep(1.5)
    assert "waiting for rank 0: 1 s of at most 9 s" in capsys.readouterr().err


def test_a_port_of_another_program_is_an_error_that_names_it(launched: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launched.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(RunError, match=r"cannot serve the other ranks at 127\.0\.0\.1:\d+.*a free port"):
            rendezvous.join("gloo", timedelta(seconds=5))


@pytest.mark.parametrize("port", ["70000", "http", "1.5"])
def test_a_wrong_port_is_an_error_that_names_it(launched: pytest.MonkeyPatch, port: str):
    launched.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=f"MASTER_PORT='{port}'"):
        rendezvous.join("gloo", timedelta(seconds=5))


def test_empty_variables_are_no_launcher(launched: pytest.MonkeyPatch):
    launched.setenv("MASTER_ADDR", "")
    with pytest.raises(ConfigError, match="torchrun"):
        Ddp(torch.device("cpu"), "gloo")


def _survivor(rank: int, ending: Callable[[], None], expected: str) -> None:
    """Join as a rank of three; rank 1 ends, and the others must raise the expected message."""
    lost_ranks.ANSWER_WITHIN = ANSWER_WITHIN
    processes = Processes(torch.device("cpu"), "gloo", 60.0)
    processes.barrier()
    if rank == 1:
        with name_lost_ranks():
            ending()
    with pytest.raises(RunError, match=expected), name_lost_ranks():
        _sum_forever(processes)


def _sum_forever(processes: Processes) -> NoReturn:
    while True:
        processes.sum([1.0])


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _failed() -> None:
    raise RewardError("reward of row 7 failed")


def test_a_killed_rank_is_named():
    statuses = forked(3, lambda rank: _survivor(rank, _killed, "of 3 ranks, rank 1 ended without a reason"))
    assert statuses == [0, -signal.SIGKILL, 0]


def test_a_rank_that_failed_is_named_with_its_reason():
    expected = "of 3 ranks, rank 1 failed with RewardError: reward of row 7 failed; mend that"
    assert forked(3, lambda rank: _survivor(rank, _failed, expected)) == [0, 70, 0]


def test_where_the_store_is_lost_its_rank_is_named():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    lost_ranks.watch(client, 1, 3)
    del store
    try:
        with pytest.raises(RunError, match="of 3 ranks, rank 0 ended without a reason"), name_lost_ranks():
            raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer")
    finally:
        lost_ranks.forget()


def test_an_error_that_is_no_lost_connection_stays_as_it_is():
    error = RuntimeError("shape mismatch")
    assert not is_connection_failure(error)
    assert not is_connection_failure(KeyError("gloo/transport"))
    with pytest.raises(RuntimeError, match="shape mismatch") as raised, name_lost_ranks():
        raise error
    assert raised.value is error
