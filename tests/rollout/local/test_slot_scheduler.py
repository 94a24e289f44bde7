"""The queue of responses and their slots, without a model."""

import itertools

import numpy as np
import pytest

from hwgrpo.rollout.local.slot_scheduler import Request, SlotScheduler, decode_steps, most_prompts


def requests(*groups: int, prompt_lengths=(1, 1, 1, 1, 1, 1)) -> list[Request]:
    """Return requests of these groups."""
    return [Request((group,) * prompt_lengths[group], key=i, limit=9, group=group) for i, group in enumerate(groups)]


def scheduler_of(slots: int, submitted: list[Request], **options) -> SlotScheduler:
    scheduler = SlotScheduler(slots, **options)
    assert [scheduler.submit(request) for request in submitted] == [*range(len(submitted))]
    return scheduler


@pytest.mark.parametrize(
    ("lengths", "slots", "steps"),
    [
        ([5, 2, 2, 3], 2, 4),
        ([5, 2, 2, 3], 1, 8),
        ([5, 2, 2, 3], 9, 4),
        ([1, 1, 1], 1, 0),
        ([1, 4, 1, 4], 1, 6),
        ([2, 2, 9], 2, 9),
        ([9, 2, 2], 2, 8),
    ],
)
def test_decode_steps_are_those_of_list_scheduling(lengths, slots, steps):
    assert decode_steps(lengths, slots) == steps


def test_decode_steps_are_between_the_bounds_of_any_schedule():
    draw = np.random.default_rng(3)
    for slots in (1, 3, 8):
        lengths = draw.integers(1, 40, 30).tolist()
        work = sum(lengths) - len(lengths)
        least = max(max(lengths) - 1, -(-work // slots))
        assert least <= decode_steps(lengths, slots) <= work / slots + max(lengths) - 1


def test_free_slots_are_filled_in_place_and_in_the_order_of_the_queue():
    scheduler = scheduler_of(3, requests(0, 0, 1, 1, 2))
    places, admitted = scheduler.admit()
    assert (places.tolist(), [request.key for request in admitted]) == ([0, 1, 2], [0, 1, 2])
    assert scheduler.pending == {(1,): 1, (2,): 1}
    assert scheduler.admit()[1] == []
    scheduler.slots["growing"][1] = False
    places, admitted = scheduler.admit()
    assert (places.tolist(), admitted[0].key) == ([1], 3)
    assert scheduler.slots["number"].tolist() == [0, 3, 2]
    scheduler.slots["growing"][[0, 2]] = False
    places, _ = scheduler.admit()
    assert (places.tolist(), scheduler.slots["growing"].tolist()) == ([0], [True, True, False])
    scheduler.keep(np.array([0, 1]))
    for request in requests(0, 0):
        scheduler.submit(request)
    places, _ = scheduler.admit()
    assert (places.tolist(), scheduler.slots["number"].tolist()) == ([2], [4, 3, 5]), "a dropped slot can be used again"


def test_every_request_gets_one_slot_whatever_ends_when():
    draw = np.random.default_rng(5)
    for slots in (1, 2, 5):
        scheduler, seen = scheduler_of(slots, requests(*[0, 1, 2, 3] * 5)), []
        while True:
            seen += [request.key for request in scheduler.admit()[1]]
            growing = np.flatnonzero(scheduler.slots["growing"])
            assert len(scheduler.slots) <= slots
            if not len(growing):
                break
            scheduler.slots["growing"][draw.choice(growing, size=draw.integers(1, len(growing) + 1), replace=False)] = (
                False
            )
        assert seen == [*range(20)]
        assert not scheduler.pending


@pytest.mark.parametrize(
    ("slots", "parts"), [(12, [12]), (8, [6, 6]), (5, [3, 3, 3, 3]), (2, [2, 1] * 4), (1, [1] * 12)]
)
def test_rows_that_are_not_refilled_take_whole_groups_as_far_as_one_fits(slots, parts):
    scheduler = scheduler_of(slots, requests(*[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]), refills=False)
    found = []
    while len(admitted := scheduler.admit()[1]):
        found.append(len(admitted))
        assert not scheduler.admit()[1], "they wait for all"
        scheduler.slots["growing"] = False
    assert found == parts


def test_prompts_of_one_length_are_decoded_together_where_padding_is_not_masked():
    submitted = requests(0, 0, 1, 2, 2, 3, prompt_lengths=(2, 2, 3, 3))
    scheduler = scheduler_of(9, submitted, refills=False, one_length=True)
    parts = []
    while len(admitted := scheduler.admit()[1]):
        parts.append([request.group for request in admitted])
        scheduler.slots["growing"] = False
    assert parts == [[0, 0, 1], [2, 2, 3]]
    scheduler = scheduler_of(2, submitted, refills=False, one_length=True)
    assert [request.group for request in scheduler.admit()[1]] == [0, 0]


def test_no_more_prompts_are_held_than_allowed_and_those_that_are_go_on():
    scheduler = scheduler_of(6, requests(*[0, 0, 1, 1, 2, 2, 2, 3, 3]), prompts=2)
    assert [request.group for request in scheduler.admit()[1]] == [0, 0, 1, 1]
    assert scheduler.admit([(0,), (1,)])[1] == []
    scheduler.slots["growing"][[0, 1]] = False
    assert [request.group for request in scheduler.admit([(1,)])[1]] == [2, 2, 2]
    scheduler.slots["growing"] = False
    assert [request.group for request in scheduler.admit([])[1]] == [3, 3]


@pytest.mark.parametrize(("slots", "n", "prompts"), [(256, 8, 96), (2, 3, 3), (9, 8, 6), (4, 1, 12)])
def test_the_prompts_that_may_be_held_follow_from_the_groups_that_slots_hold(slots, n, prompts):
    assert most_prompts(slots, n) == prompts


def test_a_dropped_group_leaves_the_queue():
    scheduler = scheduler_of(1, requests(0, 1, 0, 1, 2))
    scheduler.admit()
    assert [request.prompt for request in scheduler.next_requests(2)] == [(1,), (0,)]
    scheduler.drop_queued(0)
    assert scheduler.pending == {(1,): 2, (2,): 1}
    scheduler.drop_queued(1)
    scheduler.slots["growing"] = False
    assert [request.key for request in scheduler.admit()[1]] == [4]


def test_no_request_waits_while_a_slot_is_free():
    for ends in itertools.product([False, True], repeat=3):
        scheduler = scheduler_of(3, requests(*[0] * 6))
        scheduler.admit()
        scheduler.slots["growing"] = ~np.array(ends)
        scheduler.admit()
        assert scheduler.slots["growing"].all()
