import json

import pytest

from hwgrpo.data.sampler import PromptSampler
from hwgrpo.errors import ConfigError, DataError


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("k", [1, 3, 7, 20])
def test_every_epoch_visits_every_row_once_across_takes_of_any_size(k, shuffle):
    sampler = PromptSampler(7, seed=3, shuffle=shuffle)
    taken = []
    while len(taken) < 28:
        batch = sampler.take(k)
        assert len(batch) == k
        taken += batch
    for epoch in range(4):
        chunk = taken[7 * epoch : 7 * epoch + 7]
        assert {number for number, _ in chunk} == {epoch}
        assert sorted(row for _, row in chunk) == list(range(7))


def test_each_epoch_has_an_order_of_its_own_and_each_seed_too():
    epochs = [tuple(row for _, row in PromptSampler(50, seed=0).take(250)[50 * e : 50 * e + 50]) for e in range(5)]
    other = tuple(row for _, row in PromptSampler(50, seed=1).take(50))
    assert len({*epochs, other, tuple(range(50))}) == 7


def test_without_shuffling_rows_come_in_file_order():
    assert PromptSampler(3, seed=5, shuffle=False).take(5) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_the_order_of_a_seed_never_changes():
    assert [row for _, row in PromptSampler(8, seed=0).take(8)] == [0, 2, 1, 5, 4, 3, 6, 7]


@pytest.mark.parametrize("taken", [0, 4, 10, 11, 37])
def test_a_restored_sampler_goes_on_exactly_where_the_state_was_taken(taken):
    sampler = PromptSampler(10, seed=2)
    sampler.take(taken)
    state = json.loads(json.dumps(sampler.state()))
    resumed = PromptSampler(10, seed=2)
    resumed.take(3)
    resumed.restore(state)
    assert [resumed.take(4) for _ in range(10)] == [sampler.take(4) for _ in range(10)]


def test_a_state_of_other_data_is_refused():
    with pytest.raises(DataError, match=r"with 10 usable prompts, now there are 9"):
        PromptSampler(9, seed=2).restore(PromptSampler(10, seed=2).state())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (PromptSampler(10, seed=3), "trainer.seed=2 is not the checkpoint's 3"),
        (PromptSampler(10, seed=2, shuffle=False), "data.shuffle=True is not the checkpoint's False"),
    ],
)
def test_a_state_of_another_order_is_refused(other, words):
    with pytest.raises(ConfigError, match=words):
        PromptSampler(10, seed=2).restore(other.state())
