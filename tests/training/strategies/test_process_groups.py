"""How long ranks wait for each other."""

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hwgrpo.catalog import STRATEGIES
from hwgrpo.training import setup
from hwgrpo.training.strategies import process_group
from tests.support.models.tiny import settings
from tests.support.runs import runs

HOURS = timedelta(seconds=7200)


@pytest.fixture
def made(monkeypatch) -> list[tuple[str, object]]:
    """What is made instead of process groups, and the limits given to them."""
    found: list[tuple[str, object]] = []

    def note(name: str, result: object):
        return lambda *given, timeout=None, **more: found.append((name, timeout)) or result

    monkeypatch.setattr(dist, "init_process_group", note("world", None))
    monkeypatch.setattr(dist, "new_group", note("cpu", None))
    monkeypatch.setattr(dist, "new_subgroups", note("sequence", (None, [])))
    monkeypatch.setattr(process_group, "rendezvous", note("store", iter([(dist.HashStore(), 0, 4)])))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(process_group.Processes, "gather_objects", lambda self, value: [value])
    for name in process_group.RENDEZVOUS:
        monkeypatch.setenv(name, "4")
    return found


@pytest.mark.parametrize("restart, groups", [("0", ["world"]), ("1", ["store", "world"])])
def test_every_group_of_the_ranks_has_the_limit_of_the_settings(made, monkeypatch, restart, groups):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    strategy = STRATEGIES.load("ddp").make(torch.device("cpu"), "of a device", 7200.0)
    strategy.prepare(settings("trainer.sequence_parallel_size=2", "trainer.strategy=ddp"))
    names = [*groups, "cpu", "sequence", "sequence"]
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
