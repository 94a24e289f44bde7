"""How long ranks wait for each other."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hwgrpo.catalog import STRATEGIES
from hwgrpo.training import setup
from hwgrpo.training.strategies import lost_ranks, process_group, rendezvous
from tests.support.models.tiny import settings
from tests.support.runs import runs

HOURS = timedelta(seconds=7200)


@pytest.fixture
def made(monkeypatch) -> Iterator[list[tuple[str, object]]]:
    """What is made and awaited instead of process groups, and the limits given to them."""
    found: list[tuple[str, object]] = []

    def note(name: str, result: object):
        return lambda *given, timeout=None, **more: found.append((name, timeout)) or result

    monkeypatch.setattr(dist, "init_process_group", note("world", None))
    monkeypatch.setattr(dist, "new_group", note("cpu", None))
    monkeypatch.setattr(dist, "new_subgroups", note("sequence", (None, [])))
    monkeypatch.setattr(
        rendezvous, "_open_store", lambda launched, limit: found.append(("store", limit)) or dist.HashStore()
    )
    monkeypatch.setattr(
        rendezvous,
        "_await_ranks",
        lambda store, launched, seconds: found.append(("ranks", timedelta(seconds=seconds))),
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(process_group.Processes, "gather_objects", lambda self, value: [value])
    for name in rendezvous.RENDEZVOUS:
        monkeypatch.setenv(name, "0" if name == "RANK" else "4")
    yield found
    lost_ranks.forget()


@pytest.mark.parametrize("restart", ["0", "1"])
def test_every_group_of_the_ranks_has_the_limit_of_the_settings(made, monkeypatch, restart):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    strategy = STRATEGIES.load("ddp").make(torch.device("cpu"), "of a device", 7200.0)
    strategy.prepare(settings("trainer.sequence_parallel_size=2", "trainer.strategy=ddp"))
    names = ["store", "ranks", "world", "cpu", "sequence", "sequence"]
    assert made == [(name, HOURS) for name in names]


def test_a_run_gives_the_limit_to_its_strategy(monkeypatch, tmp_path):
    given = []

    def strategy(*arguments) -> None:
        given.append(arguments)
        raise KeyboardInterrupt

    single = STRATEGIES.load("single")
    monkeypatch.setattr(setup.STRATEGIES, "load", lambda name: replace(single, maker=strategy))
    with pytest.raises(KeyboardInterrupt):
        runs.run(tmp_path / "run", "trainer.process_group_timeout=77")
    assert given[0][1:] == ("gloo", 77.0)
