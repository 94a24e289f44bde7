"""A dry run tries the reward functions on one row, and says what they gave."""

import json
from pathlib import Path

import pytest
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.errors import ConfigError
from hwgrpo.planning import dry_run
from hwgrpo.planning.dry_run import make_plan
from tests.support.runs import runs

REWARDS = """
import asyncio

def share(solution_str, ground_truth):
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / len(ground_truth)

async def tokens(completion_ids, completions):
    await asyncio.sleep(0)
    return [float(len(ids)) for ids in completion_ids]

def stop(batch, completions):
    return [{"score": float(done), "extra": 1} for done in completions.finished.tolist()]

def raises(solution_str):
    return 1 / len(solution_str)

def no_number(solution_str):
    return "good"

def too_few(completions):
    return [1.0]

def nan(solution_str):
    return float("nan") if solution_str else 0.0

def leaves(completions):
    raise SystemExit(3)
"""


@pytest.fixture
def planned(tmp_path: Path):
    """Return a function that makes the plan of a run with some of the rewards above."""
    (tmp_path / "rewards.py").write_text(REWARDS)

    def make(*functions: str, answer: object = "134", column: str = "answer") -> str:
        rows = [{"prompt": "sort 314=", column: answer}, {"prompt": "sort 920=", column: answer}]
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        named = ", ".join(f.replace("@", f"{tmp_path}/rewards.py:") for f in functions)
        words = (f"data.train={tmp_path}/train.jsonl", f"reward.functions=[{named}]")
        shown = make_plan(runs.small(tmp_path / "run", *words), BACKEND, 1).text
        assert not (tmp_path / "run").exists()
        return shown.partition("rewards")[2].partition("schedule")[0]

    return make


def test_the_plan_says_what_each_form_of_reward_gave_for_the_answer_and_for_nothing(planned, tmp_path: Path):
    shown = planned("exact_match", "'@share'", "'@tokens'", "'@stop'")
    assert [line.strip() for line in shown.strip().splitlines()] == [
        "exact_match: 1 for the answer itself, 0 for an empty response",
        "share: 1 for the answer itself, 0 for an empty response",
        "tokens: 4 for the answer itself, 1 for an empty response",
        "stop: 1 for the answer itself, 1 for an empty response",
        f"tried on {tmp_path}/train.jsonl, line 1, whose answer is '134'",
    ]


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (134, "'134'"),
        (["134", "143"], "'134'"),
        ({"value": 134}, "'{\"value\": 134}'"),
        ("1" * 99, repr("1" * 37 + "...")),
    ],
)
def test_an_answer_of_any_kind_is_tried_as_a_text(planned, answer: object, shown: str):
    assert f"whose answer is {shown}" in planned("'@tokens'", answer=answer)


def test_a_row_without_an_answer_is_tried_with_a_made_up_response(planned):
    shown = planned("'@tokens'", column="other")
    assert "for a made-up response, 1 for an empty response" in shown
    assert "whose answer" not in shown


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "raises",
            ["reward raises", "train.jsonl, line 1", "sample 1", "ZeroDivisionError", "rewards.py:", "on_error"],
        ),
        ("no_number", ["reward no_number", "returned 'good' (str), which is not a number"]),
        ("too_few", ["too_few returned 1 values for 2 responses"]),
        ("nan", ["reward nan", "sample 0", "returned nan", "on_nan"]),
        ("leaves", ["reward leaves", "SystemExit"]),
    ],
)
def test_a_broken_reward_is_refused_as_a_mistake_of_the_settings(planned, name: str, parts: list[str]):
    with pytest.raises(ConfigError) as error:
        planned("exact_match", f"'@{name}'")
    for part in (*parts, "tried with the answer itself, sample 0, and an empty response, sample 1"):
        assert part in str(error.value)


@pytest.mark.parametrize("name", ["raises", "nan"])
def test_a_failure_that_the_settings_pass_over_is_told_and_no_error(planned, name: str):
    shown = planned("exact_match", f"{{name: '@{name}', on_error: value, on_nan: mask_sample}}")
    assert "exact_match: 1 for the answer itself" in shown
    assert f"{name} fails, which would not stop the run: reward {name}, " in shown
    assert ("ZeroDivisionError" if name == "raises" else "returned nan") in shown


def test_a_broken_reward_is_found_before_the_models_shape_is_read(planned, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dry_run, "model_shape", lambda *_: pytest.fail("the model was touched"))
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        planned("'@raises'")


def test_rewards_that_read_the_outcome_of_a_trajectory_are_tried_with_one(tmp_path: Path):
    (tmp_path / "game.py").write_text(
        "class Game:\n    def reset(self, row):\n        return 'Which number?'\n"
        "    def step(self, action):\n        return '', 1.0, True\n"
        "def score(batch, completions):\n"
        "    return [o['reward'] + len(o['messages'][0]['content']) for o in completions.outcomes]\n"
    )
    (tmp_path / "train.jsonl").write_text('{"number": 1}\n')
    words = (
        f"data.train={tmp_path}/train.jsonl",
        f"reward.functions=[{tmp_path}/game.py:score]",
        "rollout.workflow=environment",
        f"rollout.agent.environments=[{tmp_path}/game.py:Game]",
    )
    shown = make_plan(runs.small(tmp_path / "run", *words), BACKEND, 1).text
    assert "score: 18 for a made-up response, 0 for an empty response" in shown
    assert "1 prompts" in shown
