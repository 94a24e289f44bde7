"""`trainer.threads=free`: the load of other programs in /proc/stat, and a run whose threads follow it."""

import os
import time
from pathlib import Path

import pytest
import torch

from hwgrpo import Trainer
from hwgrpo.config.validate import check_world_size
from hwgrpo.errors import ConfigError
from hwgrpo.support import free_cores
from hwgrpo.support.free_cores import CpuTimes, FreeCoreThreads, load_between, parse_busy
from hwgrpo.support.jsonlines import read_lines
from tests.support.runs import reward_model_runs, runs, supervised_runs

TEXT = """cpu  1111 2222 3333 4444 5 6 7 8 9 10
cpu0 100 20 30 5000 7 4 5 6 50 8
cpu1 1000 0 0 200 0 0 0 0 0 0
cpu2 0 0 0 0 0 0 0 0 0 0
cpu10 1 2 3 4
intr 5 6 7
ctxt 12
"""


class PlantedHost:
    """CPU times of two cores, read once per second, in which this process computes for a second."""

    def __init__(self, others: float) -> None:
        self.others = others
        self.now = CpuTimes(0.0, 0.0, {0: 0.0, 1: 0.0})

    def __call__(self) -> CpuTimes:
        busy = {core: seconds + (1 + self.others) / 2 for core, seconds in self.now.busy.items()}
        self.now = CpuTimes(self.now.clock + 1, self.now.own + 1, busy)
        return self.now


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch):
    """A planted host, on which another program needs a core; torch has two threads."""
    planted, before = PlantedHost(1.0), torch.get_num_threads()
    monkeypatch.setattr(free_cores, "read_cpu_times", planted)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    torch.set_num_threads(2)
    yield planted
    torch.set_num_threads(before)


def test_a_core_is_busy_in_all_but_idle_time_and_waits_for_disks():
    assert parse_busy(TEXT, {0}, 100) == {0: (100 + 20 + 30 + 4 + 5 + 6) / 100}
    assert parse_busy(TEXT, {1}, 1000) == {1: 1.0}


def test_only_cores_of_this_process_with_ticks_are_read():
    assert parse_busy(TEXT, {1, 2, 3, 10}, 1).keys() == {1, 10}, "core 2 has no ticks, and there is no core 3"
    assert parse_busy("", {0}, 100) == {}


@pytest.mark.parametrize(
    ("own", "busy", "cores", "others"),
    [
        (2.0, {0: 11.0, 1: 22.0}, 2, 0.5),  # of 3 CPU seconds in 2 seconds, 2 are this process's
        (0.0, {0: 11.0, 1: 22.0}, 2, 1.5),
        (4.0, {0: 11.0, 1: 22.0}, 2, 0.0),  # a tick late
        (1.0, {1: 22.0}, 1, 0.5),  # core 0 went
        (1.0, {1: 22.0, 7: 99.0}, 1, 0.5),  # core 7 came
    ],
)
def test_the_load_of_others_is_what_this_process_did_not_use(own, busy, cores, others):
    before = CpuTimes(100.0, 5.0, {0: 10.0, 1: 20.0})
    load = load_between(before, CpuTimes(102.0, 5.0 + own, busy))
    assert load is not None
    assert (load.cores, load.others) == (cores, others)


@pytest.mark.parametrize(
    ("clock", "busy"), [(100.1, {0: 10.1}), (102.0, {0: 9.0}), (102.0, {1: 50.0})], ids=["short", "wrapped", "others"]
)
def test_there_is_no_load_where_a_window_is_short_or_counters_are_not_the_same(clock, busy):
    assert load_between(CpuTimes(100.0, 5.0, {0: 10.0}), CpuTimes(clock, 5.0, busy)) is None


@pytest.mark.parametrize(("others", "threads"), [(0.0, 2), (0.4, 2), (0.6, 1), (1.0, 1), (2.0, 1), (5.0, 1)])
def test_the_threads_are_the_free_cores_and_at_least_one(others, threads, host):
    host.others = others
    follow = FreeCoreThreads()
    follow.update()
    assert follow.threads == torch.get_num_threads() == threads


def test_there_are_never_more_threads_than_before(host):
    torch.set_num_threads(1)
    host.others = 0.0
    follow = FreeCoreThreads()
    assert follow.update() is None
    assert torch.get_num_threads() == 1


def test_a_short_window_is_measured_with_the_next(host, monkeypatch):
    follow = FreeCoreThreads()
    short = CpuTimes(1.1, 1.1, {0: 1.1, 1: 1.1})
    long = CpuTimes(1.25, 1.25, {0: 1.25, 1: 1.25})
    for reading, threads in ((short, 2), (long, 1)):
        monkeypatch.setattr(free_cores, "read_cpu_times", lambda reading=reading: reading)
        follow.update()
        assert torch.get_num_threads() == threads


def test_files_of_the_host_are_read_for_the_cores_of_this_process(tmp_path, monkeypatch, host):
    monkeypatch.undo()
    stat = tmp_path / "stat"
    stat.write_text(TEXT)
    monkeypatch.setattr(free_cores, "STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 10})
    times = free_cores.read_cpu_times()
    assert times is not None
    assert times.busy.keys() == {1, 10}
    assert 0 < times.own <= time.process_time()


@pytest.mark.parametrize("text", [None, "", "cpu0 no numbers\n", "cpu0 0 0 0 0 0 0 0 0 0 0\n"])
def test_torchs_default_is_used_where_the_host_cannot_be_read_and_noted_once(text, tmp_path, monkeypatch, host):
    monkeypatch.undo()
    monkeypatch.setattr(free_cores, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    if text is not None:
        (tmp_path / "stat").write_text(text)
    follow = FreeCoreThreads()
    follow.settle()
    notes = [follow.update() for _ in range(3)]
    assert "cannot be read here; torch's default of 2 threads" in str(notes[0])
    assert notes[1:] == [None, None]
    assert torch.get_num_threads() == follow.threads == 2


def test_the_threads_of_a_run_follow_the_free_cores_and_are_restored(tmp_path: Path, host, capsys):
    output, loads, seen = tmp_path / "run", [1.0, 0.0, 1.0], []
    words = (*runs.SMALL, "backend.name=cpu", "trainer.max_steps=4", "trainer.threads=free", "observe.progress=plain")
    with Trainer("tiny_sort", [*words, f"trainer.output_dir={output}"]) as trainer:
        for step in trainer:
            seen.append((step.metrics["perf/threads"], torch.get_num_threads()))
            host.others = loads[step.step - 1] if step.step <= len(loads) else 1.0
    assert seen == [(1.0, 1), (1.0, 1), (2.0, 2), (1.0, 1)]
    assert torch.get_num_threads() == 2
    assert [line["perf/threads"] for line in read_lines(output / "metrics.jsonl") if "reward" in line] == [1, 1, 2, 1]
    notes = [line for line in capsys.readouterr().out.splitlines() if "trainer.threads=free" in line]
    assert [note.partition(": ")[2][:22] for note in notes] == [
        f"{a} instead of {b} threads" for a, b in ((1, 2), (2, 1), (1, 2))
    ]


def test_supervised_training_and_that_of_reward_models_follow_too(tmp_path: Path, host):
    data = reward_model_runs.outcomes(tmp_path / "rows.jsonl", 16)
    words = ("trainer.max_steps=1", "trainer.threads=free")
    assert supervised_runs.run(tmp_path / "sft", *words) == "completed"
    torch.set_num_threads(2)
    assert (
        reward_model_runs.run(tmp_path / "rm", f"data.train={data}", f"data.validation={data}", *words) == "completed"
    )
    for name in ("sft", "rm"):
        [threads] = [
            line["perf/threads"] for line in read_lines(tmp_path / name / "metrics.jsonl") if "perf/threads" in line
        ]
        assert threads == 1.0, name


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("trainer.threads=fre",), ("trainer.threads='fre' has the wrong type; it must be int or free",)),
        (("trainer.threads='1'",), ("trainer.threads='1'", "it must be int or free")),
        (("trainer.threads=1025",), ("trainer.threads=1025", "0 <= x <= 1024")),
        (
            ("trainer.threads=free", "trainer.deterministic=true"),
            ("trainer.threads=free with trainer.deterministic=true", "set a number of threads"),
        ),
        (
            (
                "trainer.threads=free",
                "rollout.max_staleness=1",
                "algorithm.correction.name=token_truncate",
            ),
            ("trainer.threads=free with rollout.max_staleness=1", "set a number of threads"),
        ),
    ],
)
def test_what_does_not_go_with_free_threads_is_an_error_with_a_remedy(words, parts, tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        runs.small(tmp_path, *words)
    for part in parts:
        assert part in str(error.value)


def test_several_ranks_need_a_number_of_threads(tmp_path: Path):
    config = runs.small(tmp_path, "trainer.threads=free", "trainer.strategy=ddp")
    check_world_size(config, 1)
    with pytest.raises(ConfigError, match=r"trainer\.threads=free with 2 ranks.*trainer\.threads=0"):
        check_world_size(config, 2)
