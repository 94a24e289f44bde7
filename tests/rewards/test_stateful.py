"""A reward that is a class: made once, called per batch or sample, closed with the pipeline."""

import pytest
import torch

from hwgrpo.errors import ConfigError
from hwgrpo.rewards.combine import RewardPipeline

COUNTING = """
made = []
class Counting:
    def __init__(self, device, name, start=0, max_response_tokens=None):
        self.calls, self.place, self.closed = start, (str(device), name, max_response_tokens), False
        made.append(self)
    def __call__(self, batch, completions):
        self.calls += 1
        return [float(self.calls)] * len(completions)
    def close(self):
        self.closed = True
class Each:
    def __init__(self, factor): self.factor = factor
    def __call__(self, solution_str): return self.factor * len(solution_str)
class Broken:
    def __init__(self): raise OSError("no such thing")
    def __call__(self, solution_str): return 0
"""


def test_a_class_is_made_once_called_with_its_state_and_closed(make_batch, reward_config, reward_file):
    path = reward_file(COUNTING)
    config = reward_config({"name": f"{path}:Counting", "kwargs": {"start": 5}}, {"name": f"{path}:Counting"})
    pipeline = RewardPipeline(config, context={"max_response_tokens": 7}, device=torch.device("meta"))
    first = pipeline.score(*make_batch([["a", "b"]]))
    second = pipeline.score(*make_batch([["a", "b"]]))
    assert first.per_function["Counting"].tolist() == [6.0, 6.0]
    assert second.per_function["Counting"].tolist() == [7.0, 7.0]
    assert second.per_function["Counting_2"].tolist() == [2.0, 2.0]
    objects = [function.call for function in pipeline.functions]
    assert [each.place for each in objects] == [("meta", "Counting", 7), ("meta", "Counting_2", 7)]
    assert not any(each.closed for each in objects)
    pipeline.close()
    assert all(each.closed for each in objects)


def test_an_object_may_be_called_per_sample(make_batch, reward_config, reward_file):
    config = reward_config({"name": f"{reward_file(COUNTING)}:Each", "kwargs": {"factor": 3}})
    assert RewardPipeline(config).score(*make_batch([["ab", "c"]])).total.tolist() == [6.0, 3.0]


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"name": "Each"}, ["needs factor", "kwargs.factor"]),
        ({"name": "Each", "kwargs": {"factr": 1}}, ["'factr'", "Did you mean 'factor'"]),
        ({"name": "Counting", "kwargs": {"device": "cpu"}}, ["kwargs.device", "the trainer passes"]),
        ({"name": "Broken"}, ["Broken cannot be made: OSError: no such thing"]),
        ({"name": "Each", "kwargs": {"factor": 1}, "timeout": 5.0}, ["has state", "timeout and workers"]),
        ({"name": "Each", "kwargs": {"factor": 1}, "workers": 1}, ["has state", "timeout and workers"]),
    ],
)
def test_what_is_wrong_with_a_class_is_named(reward_config, reward_file, settings, expected):
    path = reward_file(COUNTING)
    with pytest.raises(ConfigError) as error:
        RewardPipeline(reward_config({**settings, "name": f"{path}:{settings['name']}"}))
    for words in ["reward.functions[0]", *expected]:
        assert words in str(error.value)
