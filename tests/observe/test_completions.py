"""completions.jsonl, and the one sample that is shown."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from hwgrpo.observe.completions import CompletionsLog, Sample, complete_groups_first, pick_sample
from hwgrpo.values import PromptBatch
from tests.observe.values import batch_of


def logged(run_dir):
    return [json.loads(line) for line in (run_dir / "completions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("sizes", "limit", "chosen"),
    [
        ([2, 2, 2], 6, [0, 1, 2, 3, 4, 5]),
        ([2, 2, 2], 4, [0, 1, 2, 3]),
        ([2, 2, 2], 5, [0, 1, 2, 3, 4]),
        ([3, 5, 2], 5, [0, 1, 2, 8, 9]),
        ([4, 4], 3, [0, 1, 2]),
        ([1, 3], 3, [0, 1, 2]),
        ([2], 0, []),
        ([], 4, []),
    ],
)
def test_whole_groups_come_first_and_then_parts_of_others(sizes, limit, chosen):
    assert complete_groups_first([g for g, size in enumerate(sizes) for _ in range(size)], limit) == chosen


def test_a_sample_is_written_with_everything_about_it(tmp_path):
    CompletionsLog(tmp_path, 16).log(7, *batch_of([1, 2]))
    lines = logged(tmp_path)
    assert len(lines) == 3
    assert lines[2] == {
        "step": 7,
        "uid": "row1@0",
        "prompt": "prompt 1",
        "question": None,
        "response": "response 2",
        "reward": 0.25,
        "rewards": {"exact_match": 0.25},
        "advantage": 1.0,
        "length": 3,
        "finished": True,
        "ground_truth": "answer 1",
        "source": "task://sort",
    }


def test_of_a_trajectory_the_tokens_are_written_and_which_of_them_were_sampled(tmp_path):
    batch, completions, *others = batch_of([3])
    ends = completions.offsets.tolist()
    mask = torch.ones(ends[-1], dtype=torch.bool)
    mask[ends[2] : ends[2] + 2] = False
    outcomes = ({"reward": 1.0}, {}, {})
    completions = dataclasses.replace(completions, loss_mask=mask, outcomes=outcomes)
    CompletionsLog(tmp_path, 16).log(7, batch, completions, *others)
    lines, tokens = logged(tmp_path), completions.token_lists()
    assert (lines[0]["tokens"], lines[0]["sampled"]) == (tokens[0], [[0, len(tokens[0])]])
    assert "tokens" not in lines[1]
    assert "outcome" not in lines[1]
    assert (lines[2]["tokens"], lines[2]["sampled"]) == (tokens[2], [[2, 3]])


def test_a_conversation_is_headed_by_its_last_user_message(tmp_path):
    batch, *others = batch_of([1])
    turns = [
        ("system", "Be brief."),
        ("user", "first"),
        ("assistant", "yes"),
        ("user", [{"type": "text", "text": "2+2"}]),
    ]
    messages: Any = tuple({"role": role, "content": content} for role, content in turns)
    batch = PromptBatch((dataclasses.replace(batch.prompts[0], messages=messages),))
    CompletionsLog(tmp_path, 8).log(1, batch, *others)
    assert logged(tmp_path)[0]["question"] == "2+2"
    sample = pick_sample(1, batch, *others[:2])
    assert sample is not None
    assert sample.prompt == "2+2"


def test_at_most_per_step_samples_are_written_each_step(tmp_path):
    log = CompletionsLog(tmp_path, 2)
    for step in (1, 2):
        log.log(step, *batch_of([2, 2]))
    assert [(line["step"], line["response"]) for line in logged(tmp_path)] == [
        (1, "response 0"),
        (1, "response 1"),
        (2, "response 0"),
        (2, "response 1"),
    ]


def test_a_reward_that_does_not_count_or_was_not_given_is_null(tmp_path):
    batch, completions, rewards, advantages = batch_of([3])
    rewards = dataclasses.replace(
        rewards,
        valid=torch.tensor([True, False, True]),
        per_function={"a": torch.tensor([1.0, math.nan, math.inf], dtype=torch.float64)},
        extras=({"pred": "x"}, {}, {"pred": math.nan}),
    )
    CompletionsLog(tmp_path, 8).log(1, batch, completions, rewards, advantages)
    lines = logged(tmp_path)
    assert [line["reward"] for line in lines] == [0.0, None, 0.25]
    assert [line["rewards"]["a"] for line in lines] == [1.0, None, "Infinity"]
    assert [line["extras"] for line in lines] == [{"pred": "x"}, {}, {"pred": "NaN"}]


def test_samples_of_later_steps_are_cut_off(tmp_path):
    log = CompletionsLog(tmp_path, 2)
    for step in (1, 2, 3):
        log.log(step, *batch_of([2]))
    with (tmp_path / "completions.jsonl").open("a") as file:
        file.write('{"step": 4, "uid": "ro')
    CompletionsLog(tmp_path, 2).cut_back(2)
    assert [line["step"] for line in logged(tmp_path)] == [1, 1, 2, 2]


def test_the_sample_shown_belongs_together_and_moves_on_each_step():
    batch, completions, rewards, _ = batch_of([1, 2])
    assert pick_sample(5, batch, completions, rewards) == Sample("prompt 1", "response 2", 0.25, "answer 1")
    assert pick_sample(6, batch, completions, rewards) == Sample("prompt 0", "response 0", 0.0, "answer 0")
    masked = dataclasses.replace(rewards, valid=torch.tensor([True, False, True]))
    shown = pick_sample(4, batch, completions, masked)
    assert shown is not None
    assert shown.reward is None


def test_an_empty_batch_has_no_sample_to_show():
    batch, completions, rewards, _ = batch_of([])
    assert pick_sample(1, batch, completions, rewards) is None


CALL = {"function": {"name": "search", "arguments": {"query": "a b", "k": 3}}}
TURNS = {
    "messages": [
        {"role": "assistant", "content": "I look\nit up.", "tool_calls": [CALL]},
        {"role": "tool", "name": "search", "content": "x" * 300 + "end"},
        {"role": "assistant", "content": "5"},
    ],
    "turn_rewards": [0.0, -0.5],
    "stop": "done",
    "failure": "",
}


def test_a_sample_of_several_turns_is_shown_as_its_turns_and_a_single_turn_as_its_text():
    batch, completions, rewards, _ = batch_of([3])
    single = TURNS | {"messages": TURNS["messages"][2:]}
    failed = TURNS | {"failure": "Guess.step broke", "turn_rewards": []}
    completions = dataclasses.replace(completions, outcomes=(TURNS, single, failed))
    samples = [pick_sample(step, batch, completions, rewards) for step in range(3)]
    first, second, third = [None if sample is None else sample.response.splitlines() for sample in samples]
    assert first == [
        'policy: I look it up. search(query="a b", k=3)',
        f"tool search: {'x' * 66} … {'x' * 30}end",
        "policy: 5 [-0.5]",
        "(done)",
    ]
    assert second == ["response 1"]
    assert third is not None
    assert third[2:] == ["policy: 5", "(Guess.step broke)"]
