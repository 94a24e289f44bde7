"""Samples and their median, minimum and spread; the order of a round."""

from __future__ import annotations

import pytest

from hwgrpo.bench.times import Times, turns


def test_spread_is_the_width_of_the_middle_half():
    times = Times([5.0, 1.0, 2.0, 3.0, 100.0], [0.0] * 5)
    assert (times.median, times.minimum, times.spread) == (3.0, 1.0, 3.0)


def test_one_sample_has_no_spread_and_none_has_nothing():
    assert Times([2.0], [1.0]).spread is None
    nothing = Times()
    assert (nothing.median, nothing.minimum, nothing.spread) == (None, None, None)


def test_wall_and_processor_time_are_taken_between_two_synchronizations():
    events: list[str] = []
    wall, cpu = iter([10.0, 12.5]), iter([3.0, 4.0])
    times = Times()
    clocks = (lambda: next(wall), lambda: next(cpu))
    with times.measure(lambda: events.append("synchronize"), clocks=clocks):
        events.append("work")
    assert events == ["synchronize", "work", "synchronize"]
    assert (times.wall_s, times.cpu_s) == ([2.5], [1.0])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_within_as_many_rounds_as_items_each_item_comes_first_once(count: int):
    items = list(range(count))
    orders = [turns(items, number) for number in range(count)]
    assert sorted(order[0] for order in orders) == items
    assert all(sorted(order) == items for order in orders)


def test_nothing_takes_no_turns():
    assert turns([], 3) == []
