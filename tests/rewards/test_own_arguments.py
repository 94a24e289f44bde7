"""Arguments of reward functions: what one call changes in them, no sibling, reward or epoch sees."""

import textwrap
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.own_copies import own_copy
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.trainer.step_record import StepRecorder

CHAT = ({"role": "user", "content": "hi"},)
TAKE = """
def take(row):
    found = row["answers"].pop() + row.pop("bonus")
    row["seen"] = True
    return found
"""
FORMS = {
    "verl": "def f(solution_str, ground_truth, extra_info): return take(ground_truth) + take(extra_info)",
    "verl, async": """
        async def f(solution_str, ground_truth, extra_info):
            return take(ground_truth) + take(extra_info)
    """,
    "verl, a class": """
        class f:
            def __call__(self, solution_str, ground_truth, extra_info):
                return take(ground_truth) + take(extra_info)
    """,
    "verl, changed arguments of the config": """
        def f(solution_str, limits): return limits.pop() + limits.pop() - 4
    """,
    "TRL": """
        def f(prompts, completions, ground_truth, extra_info, **columns):
            [each.pop()["content"] for each in (*prompts, *completions)]
            return [take(truth) + take(info) for truth, info in zip(ground_truth, extra_info)]
    """,
    "TRL, async": """
        async def f(prompts, completions, ground_truth, extra_info):
            return [take(truth) + take(info) for truth, info in zip(ground_truth, extra_info)]
    """,
    "batch": """
        def f(batch, completions):
            completions.tokens.zero_()
            values = [take(prompt.ground_truth) + take(prompt.columns["extra_info"]) for prompt in batch.prompts]
            [prompt.columns.clear() or prompt.messages[0].clear() for prompt in batch.prompts]
            return [values[index] for index in completions.prompt_index.tolist()]
    """,
}


def row(answer):
    return {"answers": [0, answer], "bonus": 2}


@pytest.fixture
def batch(make_batch):
    columns = [{"extra_info": row(3), "prompt": "p"}, {"extra_info": row(5), "prompt": "q"}]
    return make_batch([["a", "b", "c"], ["d", "e", "f"]], [row(1), row(2)], columns, CHAT)


@pytest.mark.parametrize(("form", "workers"), [*((form, 0) for form in FORMS), ("verl, async", 1), ("TRL", 1)])
def test_what_a_reward_takes_out_of_its_arguments_is_there_for_siblings_rewards_and_epochs(
    form, workers, batch, reward_config, reward_file
):
    """A `pop` in one reward changed the data of the prompt's other responses and of later epochs."""
    file = reward_file(TAKE + textwrap.dedent(FORMS[form]))
    setting = {"name": f"{file}:f"} | ({"kwargs": {"limits": [8, 5, 4]}} if "config" in form else {})
    if workers:
        setting |= {"workers": workers}
    expected = [5.0] * 6 if "config" in form else [8.0] * 3 + [11.0] * 3
    prompts, completions = batch
    with RewardPipeline(reward_config(setting, setting)) as rewards:
        for epoch in range(2):
            values = rewards.score(prompts, completions, epoch).per_function
            assert [each.tolist() for each in values.values()] == [expected] * 2
    assert [each.ground_truth for each in prompts.prompts] == [row(1), row(2)]
    assert [each.columns["extra_info"] for each in prompts.prompts] == [row(3), row(5)]
    assert [each.messages for each in prompts.prompts] == [CHAT] * 2
    assert CHAT == ({"role": "user", "content": "hi"},)
    assert completions.tokens.tolist() == [ord(each) for each in "abcdef"]


def test_a_copy_equals_its_value_and_shares_nothing_that_changes():
    cyclic: list = [1]
    cyclic.append(cyclic)
    lock, text = threading.Lock(), "x" * 1000
    value = {
        "flat": [1, 2],
        "deep": {"a": [{"b": (1, [2])}]},
        "set": {1},
        "array": np.arange(3),
        "tensor": torch.ones(2),
        "text": text,
        "lock": lock,
        "cyclic": cyclic,
        "twice": None,
    }
    value["twice"] = value["deep"]
    copied = own_copy(value)
    assert copied["text"] is text
    assert copied["lock"] is lock
    assert copied["cyclic"][1] is copied["cyclic"]
    assert copied["twice"] is copied["deep"]
    assert copied["deep"] == value["deep"]
    assert list(copied) == list(value)
    copied["flat"].append(3)
    copied["deep"]["a"][0]["b"][1].append(3)
    copied["set"].add(2)
    copied["array"][0] = 7
    copied["tensor"][0] = 7
    assert (value["flat"], value["deep"], value["set"]) == ([1, 2], {"a": [{"b": (1, [2])}]}, {1})
    assert value["array"].tolist() == [0, 1, 2]
    assert value["tensor"].tolist() == [1, 1]


def test_a_row_that_is_nested_more_deeply_than_a_function_can_recurse_is_copied():
    value: list = []
    for _ in range(10_000):
        value = [value]
    copied = own_copy(value)
    depth = 0
    while copied:
        depth, copied = depth + 1, copied[0]
    assert depth == 10_000


def test_responses_that_the_trainer_returns_share_no_ground_truth_with_the_data_or_each_other(batch, reward_config):
    prompts, completions = batch
    with RewardPipeline(reward_config({"name": "length", "kwargs": {"max_response_tokens": 8}})) as pipeline:
        rewards = pipeline.score(prompts, completions)
    recorder = StepRecorder(SimpleNamespace(completions=lambda *_: None))  # type: ignore[arg-type]
    recorder.completions(1, prompts, completions, rewards, torch.zeros(6))
    truths = [record["ground_truth"]["answers"].pop() for record in recorder.last(None).completions]
    assert truths == [1, 1, 1, 2, 2, 2]
    assert prompts.prompts[0].ground_truth == row(1)


def test_an_advantage_function_that_computes_in_place_leaves_the_rewards_as_they_are(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def centred(rewards_S, group_S, valid_S, config, lengths_S=None):\n"
        "    config.kwargs.clear()\n"
        "    return rewards_S.sub_(rewards_S.mean()).float()\n"
    )
    rewards, group = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    config = AdvantageConfig(name=f"{file}:centred")
    advantages = group_advantages(rewards, group, torch.ones(2, dtype=torch.bool), config)
    assert (advantages.tolist(), rewards.tolist()) == ([-1.0, 1.0], [1.0, 3.0])
