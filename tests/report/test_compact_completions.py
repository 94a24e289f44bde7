"""Completions become columns in groups, thinned out by whole steps."""

import math
from collections import Counter
from pathlib import Path

import pytest

from hwgrpo.report.compact_completions import compact, read_completions, steps_to_keep
from hwgrpo.support.jsonlines import read_lines


def line(step, uid="0:1", **values):
    return {
        "step": step,
        "uid": uid,
        "prompt": f"prompt {uid}",
        "response": "yes",
        "reward": 1.0,
        "advantage": 0.5,
        **values,
    }


def test_every_completion_of_a_run_is_found_again_in_its_group(trained: Path):
    data = read_completions(trained, 10_000)
    groups, rows = data["groups"], data["rows"]
    found = Counter()
    for g, (step, uid) in enumerate(zip(groups["step"], groups["uid"])):
        for r in range(groups["start"][g], groups["start"][g + 1]):
            found[
                step, uid, data["texts"][groups["prompt"][g]], rows["response"][r], rows["reward"][r], rows["length"][r]
            ] += 1
    written = list(read_lines(trained / "completions.jsonl"))
    assert data["total"] == data["kept"] == len(written) == 96
    assert found == Counter(
        (w["step"], w["uid"], w["prompt"], w["response"], compact(w["reward"]), w["length"]) for w in written
    )
    assert list(rows["rewards"]) == ["share_right"]
    assert all(len(rows[name]) == 96 for name in ("advantage", "finished"))


def test_one_prompt_in_two_steps_is_two_groups_and_its_text_is_kept_once(make_run):
    folder = make_run(None, [line(1), line(1), line(2), line(2, uid="0:2")])
    data = read_completions(folder, 100)
    assert data["groups"]["step"] == [1, 2, 2]
    assert data["groups"]["start"] == [0, 2, 3, 4]
    assert data["texts"].count("prompt 0:1") == 1


def test_what_a_completion_lacks_is_null(make_run):
    folder = make_run(
        None, [line(1, reward=None, rewards={"a": None, "b": 2}, finished=False, extras={"why": "late"}), line(1)]
    )
    rows = read_completions(folder, 100)["rows"]
    assert rows["reward"] == [None, 1]
    assert rows["rewards"] == {"a": [None, None], "b": [2, None]}
    assert rows["finished"] == [0, 1]
    assert rows["extras"] == {0: {"why": "late"}}


@pytest.mark.parametrize(
    ("limit", "kept"),
    [(100, {1, 2, 3, 4, 5}), (30, {1, 3, 5}), (29, {2, 5}), (20, {2, 5}), (10, {5}), (1, {5}), (0, set())],
)
def test_a_limit_keeps_whole_steps_evenly_spread_and_the_last(limit: int, kept: set[int]):
    assert steps_to_keep(dict.fromkeys(range(1, 6), 10), limit) == kept


def test_a_page_within_its_limit_knows_how_many_there_were(make_run):
    folder = make_run(None, [line(step) for step in range(1, 11) for _ in range(4)])
    data = read_completions(folder, 20)
    assert (data["total"], data["kept"], data["groups"]["step"]) == (40, 20, [2, 4, 6, 8, 10])


def test_numbers_are_short_and_what_is_not_finite_is_null():
    assert compact(0.123456789) == 0.123457
    assert compact(1.0) == 1
    assert isinstance(compact(1.0), int)
    assert compact(-1.25e-9) == -1.25e-9
    assert [compact(value) for value in (None, math.nan, math.inf, "NaN", "no")] == [None] * 5


def test_a_run_without_completions_has_no_groups(make_run):
    data = read_completions(make_run(), 100)
    assert (data["total"], data["groups"]["start"]) == (0, [0])


def test_trajectories_keep_their_turns_with_calls_and_the_reward_of_each(make_run):
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "x", "k": 3}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "found", "name": "search"},
        {"role": "assistant", "content": "yes"},
    ]
    outcome = {"environment": "Guess", "stop": "failed", "failure": "Guess.step broke", "turn_rewards": [0.25]}
    outcome |= {"calls": {"search": 2, "run": 1}, "failed_calls": {"error": 1}, "messages": messages}
    single = {"environment": "", "stop": "done", "turn_rewards": [1.0], "messages": messages[2:]}
    rows = read_completions(make_run(None, [line(1, outcome=outcome), line(1, outcome=single), line(1)]), 100)["rows"]
    assert rows["response"] == ["", "yes", "yes"]
    assert rows["outcomes"][0] == {
        "environment": "Guess",
        "stop": "failed",
        "failure": "Guess.step broke",
        "calls": 3,
        "failed": 1,
        "turns": [
            {"role": "assistant", "text": "", "reasoning": "hm", "calls": [["search", {"query": "x", "k": 3}]],
             "reward": 0.25},
            {"role": "tool", "text": "found", "name": "search"},
            {"role": "assistant", "text": "yes", "reward": None},
        ],
    }  # fmt: skip
    assert rows["outcomes"][1]["turns"] == []
    assert rows["outcomes"].keys() == {0, 1}
