"""Steps of TRL and verl: rewards and advantages as the peers compute them, and files that are none."""

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from tests.support.runs import runs
from tests.support.runs.captures import error_of, replay

RECIPE = (
    *("--recipe", "tiny_sort", "rollout.n=4", "algorithm.advantage.eps=1e-4"),
    "reward.functions=[{name: exact_match, weight: 1.0}, {name: length, weight: 0.5}]",
    next(each for each in runs.SMALL if each.startswith("model.path=")),  # a model that other tests have made, too
)
REWARDS, MODEL = RECIPE[-2:]
RESPONSES = ["123", "321", "12", "1234", "5", "579", "57", "579"]
TRUTHS = ["123"] * 4 + ["579"] * 4


def rewards_of_trl() -> dict[str, list[float]]:
    return {
        "exact_match": [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0],
        "length": [0.1, 0.7, -0.3, 0.2, 0.9, 0.4, 0.0, 0.4],
    }


def advantages_of_trl(rewards: dict[str, list[float]], scale: str = "group") -> list[float]:
    """As TRL's grpo_trainer.py: fp32, nansum over functions, unbiased standard deviation plus 1e-4."""
    per_function = torch.tensor([*rewards.values()]).T
    total = (per_function * torch.tensor([1.0, 0.5])).nansum(1).view(-1, 4)
    centred = total - total.mean(1, keepdim=True)
    return (centred / (total.std(1, keepdim=True) + 1e-4) if scale == "group" else centred).flatten().tolist()


def write_trl(path: Path, **changes: Any) -> Path:
    rewards = rewards_of_trl()
    rows = {
        "step": [3] * 8,
        "prompt": ["sort 321"] * 4 + ["sort 975"] * 4,
        "completion": RESPONSES,
        **rewards,
        "advantage": advantages_of_trl(rewards),
    }
    rows = {name: values for name, values in (rows | changes).items() if values is not None}
    pyarrow.parquet.write_table(pyarrow.table(rows), path)
    return path


def write_verl(path: Path, change: float = 0.0, **columns: Any) -> Path:
    """As verl's `_dump_generations`, in the order of a batch that was balanced over ranks."""
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    rows = [
        {
            "input": "sort 321" if i < 4 else "sort 975",
            "output": RESPONSES[i],
            "gts": TRUTHS[i],
            "score": float(RESPONSES[i] == TRUTHS[i]) + change * (i == 6),
            "step": 3,
            **columns,
        }
        for i in order
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_advantages_of_trl_are_those_of_its_rewards(tmp_path: Path, capsys):
    report = replay(capsys, write_trl(tmp_path / "completions_00003.parquet"), *RECIPE)
    assert (report["peer"], report["step"], report["passed"]) == ("TRL", 3, True), report
    [stage] = report["stages"]
    assert stage["name"] == "advantages"
    assert stage["tolerance"] < 1e-4
    assert [len(group["advantages"]["here"]) for group in report["groups"]] == [4, 4]
    assert "rewards are not recomputed: the file has no ground truths" in report["notes"]
    assert any("tokens are those of model.path=" in note for note in report["notes"])


@pytest.mark.parametrize(
    "setting", ["algorithm.advantage.eps=1e-2", "algorithm.advantage.std_correction=0", "algorithm.advantage.name=rloo"]
)
def test_another_formula_than_trls_is_named_with_group_and_response(setting: str, tmp_path: Path, capsys):
    recipe = [each for each in RECIPE if not each.startswith("algorithm.")]
    eps = () if setting.startswith(("algorithm.advantage.eps", "algorithm.advantage.name")) else RECIPE[3:4]
    report = replay(capsys, write_trl(tmp_path / "completions_00003.parquet"), *recipe, *eps, setting)
    assert report["first_difference"] == "advantages"
    assert "advantage of group" in report["stages"][0]["tensor"]


def test_a_reward_that_trl_did_not_get_does_not_count(tmp_path: Path, capsys):
    rewards = rewards_of_trl()
    rewards["length"][1] = float("nan")
    path = write_trl(tmp_path / "c.parquet", **rewards, advantage=advantages_of_trl(rewards))
    assert replay(capsys, path, *RECIPE)["passed"]


def test_rewards_of_verl_are_computed_from_its_texts(tmp_path: Path, capsys):
    recipe = (*RECIPE[:3], MODEL, "reward.functions=[exact_match]")
    report = replay(capsys, write_verl(tmp_path / "3.jsonl"), *recipe)
    assert (report["peer"], report["passed"]) == ("verl", True), report
    assert [stage["name"] for stage in report["stages"]] == ["rewards"]
    assert "advantages are not compared: a file of verl has none" in report["notes"][-1]
    assert report["groups"][1]["rewards"] == {"peer": [0.0, 1.0, 0.0, 1.0], "here": [0.0, 1.0, 0.0, 1.0]}
    assert sum(report["groups"][1]["advantages"]["here"]) == pytest.approx(0, abs=1e-6)
    report = replay(capsys, write_verl(tmp_path / "4.jsonl", change=0.5), *recipe)
    assert report["first_difference"] == "rewards"
    assert (report["stages"][0]["tensor"], report["stages"][0]["index"]) == ("reward of group 1, response ", [2])


def write_pickle(path: Path) -> Path:
    path.write_bytes(pickle.dumps({"batch": 1}))
    return path


def write_text(path: Path) -> Path:
    path.write_text("{}")
    return path


@pytest.mark.parametrize(
    ("write", "name", "arguments", "message"),
    [
        (write_pickle, "dump.pt", RECIPE, "is a pickle, as verl's skip dumps are"),
        (write_text, "step.json", RECIPE, "a step of TRL is a .parquet file"),
        (lambda path: write_trl(path, step=[3] * 4 + [4] * 4), "c.parquet", RECIPE, "has the steps 3, 4"),
        (lambda path: write_trl(path, advantage=None), "c.parquet", RECIPE, "has the columns"),
        (lambda path: write_trl(path, length=None), "c.parquet", RECIPE, "no column of the reward function 'length'"),
        (lambda path: write_trl(path, completion=[1] * 8), "c.parquet", RECIPE, "completion is no text"),
        (write_trl, "c.parquet", (*RECIPE[:2], "rollout.n=3", REWARDS, MODEL), "rollout.n=3"),
        (write_trl, "c.parquet", (), "name the recipe"),
        (write_trl, "c.parquet", ("--recipe", "tiny_sort", "--checkpoint", "x"), "--checkpoint x"),
        (write_trl, "c.parquet", (*RECIPE[:3], REWARDS, MODEL, "algorithm.preset=remax"), "reads greedy_S"),
    ],
)
def test_a_file_that_cannot_be_compared_is_an_error_that_says_why(write, name, arguments, message, tmp_path, capsys):
    assert message in error_of(capsys, write(tmp_path / name), *arguments)
