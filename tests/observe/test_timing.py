"""Seconds per stage, counted on a clock that the tests move."""

import weakref
from contextlib import contextmanager, suppress

import pytest

from hwgrpo.observe.timing import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_stage_that_runs_twice_in_a_step_is_added_up_and_taking_starts_again():
    clock = Clock()
    watch = Stopwatch(clock=clock)
    for _ in range(2):
        with watch("gen"):
            clock.now += 1.5
    with watch("reward"):
        clock.now += 0.25
    assert watch.take() == {"timing_s/gen": 3.0, "timing_s/reward": 0.25}
    assert watch.take() == {}


def test_an_outer_stage_holds_the_time_of_its_inner_ones():
    clock = Clock()
    watch = Stopwatch(clock=clock)
    with watch("step"):
        clock.now += 1
        with watch("gen"):
            clock.now += 2
    assert watch.take() == {"timing_s/gen": 2.0, "timing_s/step": 3.0}


def test_queued_work_counts_for_the_stage_that_queued_it():
    clock = Clock()
    queued = [4.0]

    def synchronize() -> None:
        clock.now += sum(queued)
        queued.clear()

    watch = Stopwatch(synchronize, clock=clock)
    with watch("gen"):
        queued.append(2.0)
    assert watch.take() == {"timing_s/gen": 2.0}, "work queued before the stage, or none of its own, was counted"


def test_a_stage_that_raises_is_counted_and_its_error_passes():
    clock = Clock()
    watch = Stopwatch(clock=clock)

    def failing_stage() -> None:
        with watch("gen"):
            clock.now += 1
            raise KeyError("x")

    with pytest.raises(KeyError):
        failing_stage()
    assert watch.take() == {"timing_s/gen": 1.0}


def test_each_stage_is_a_range_for_a_profiler():
    said = []

    @contextmanager
    def trace(name):
        said.append(f"open {name}")
        yield
        said.append(f"close {name}")

    watch = Stopwatch(lambda: said.append("synchronize"), trace=trace)
    with watch("gen"):
        said.append("work")
    assert said == ["synchronize", "open gen", "work", "synchronize", "close gen"]


def test_the_innermost_stage_that_failed_is_told():
    watch = Stopwatch()
    assert watch.failed is None
    with suppress(ZeroDivisionError), watch("step"):
        with watch("gen"):
            pass
        with watch("reward"):
            raise ZeroDivisionError
    assert watch.failed == "reward"
    with pytest.raises(ZeroDivisionError), watch("step"):
        raise ZeroDivisionError
    assert watch.failed == "step"


def test_a_stage_that_failed_keeps_nothing_alive():
    class Model:
        pass

    def work(watch):
        model = Model()
        seen.append(weakref.ref(model))
        with watch("gen"):
            raise ZeroDivisionError
        return model

    seen = []
    watch = Stopwatch()
    with suppress(ZeroDivisionError):
        work(watch)
    assert seen[0]() is None
