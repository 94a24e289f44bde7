"""Files in verl's and TRL's schemas train with the rewards that those libraries' users wrote; bad ones are named."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hwgrpo.errors import DataError, RewardError
from tests.support.runs import runs

PROMPTS = [("sort 314=", "134"), ("sort 920=", "029"), ("sort 777=", "777"), ("sort 561=", "156")] * 3

VERL_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    assert data_source == "digits" and extra_info["index"] >= 0
    right = sum(a == b for a, b in zip(solution_str, ground_truth)) / len(ground_truth)
    return {"score": right + bonus, "length": len(solution_str)}
"""
TRL_REWARD = """
def share_right(completions, answer, **kwargs):
    return [sum(a == b for a, b in zip(c, t)) / len(t) for c, t in zip(completions, answer)]
"""


def share_right(response: str, answer: str) -> float:
    return sum(a == b for a, b in zip(response, answer, strict=False)) / len(answer)


def write_verl(path: Path) -> Path:
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "sorting",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": "train", "index": i},
        }
        for i, (prompt, answer) in enumerate(PROMPTS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_trl(path: Path) -> Path:
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in PROMPTS))
    return path


def rewards_add_up(output: Path, bonus: float = 0.0) -> None:
    """Recompute every logged reward from the logged response."""
    samples = [json.loads(line) for line in (output / "completions.jsonl").read_text().splitlines()]
    assert len(samples) >= 32
    for sample in samples:
        assert sample["reward"] == pytest.approx(share_right(sample["response"], sample["ground_truth"]) + bonus)
    assert len({sample["reward"] for sample in samples}) > 1


def test_a_parquet_in_verls_schema_trains_with_verls_reward_function(tmp_path: Path):
    (tmp_path / "score.py").write_text(VERL_REWARD)
    data = write_verl(tmp_path / "train.parquet")
    reward = f"{{name: '{tmp_path}/score.py:compute_score', kwargs: {{bonus: 0.25}}}}"
    words = (f"data.train={data}", f"data.validation={data}", f"reward.functions=[{reward}]", "trainer.max_steps=3")
    assert runs.run(tmp_path / "run", *words) == "completed"
    rewards_add_up(tmp_path / "run", bonus=0.25)
    assert any("val-core/digits/reward/greedy" in line for line in runs.metrics(tmp_path / "run"))


def test_a_jsonl_in_trls_schema_trains_with_trls_reward_function(tmp_path: Path):
    (tmp_path / "rewards.py").write_text(TRL_REWARD)
    data = write_trl(tmp_path / "train.jsonl")
    words = (f"data.train={data}", f"reward.functions=['{tmp_path}/rewards.py:share_right']", "trainer.max_steps=3")
    assert runs.run(tmp_path / "run", *words) == "completed"
    rewards_add_up(tmp_path / "run")


def test_two_rewards_are_summed_with_their_weights(tmp_path: Path):
    (tmp_path / "rewards.py").write_text(TRL_REWARD)
    data = write_trl(tmp_path / "train.jsonl")
    both = f"[{{name: exact_match, weight: 2.0}}, {{name: '{tmp_path}/rewards.py:share_right', weight: 0.5}}]"
    assert runs.run(tmp_path / "run", f"data.train={data}", f"reward.functions={both}", "trainer.max_steps=2")
    samples = [json.loads(line) for line in (tmp_path / "run/completions.jsonl").read_text().splitlines()]
    for s in samples:
        exact = float(s["response"].strip() == s["ground_truth"])
        assert s["reward"] == pytest.approx(2.0 * exact + 0.5 * share_right(s["response"], s["ground_truth"]))


def _missing_column(path: Path) -> None:
    path.write_text('{"question": "sort 314="}\n')


def _empty_prompt(path: Path) -> None:
    path.write_text('{"prompt": "sort 314="}\n{"prompt": ""}\n')


def _broken_line(path: Path) -> None:
    path.write_text('{"prompt": "sort 314="}\n{"prompt": "so\n')


def _not_utf8(path: Path) -> None:
    path.write_bytes(b'{"prompt": "sort 314="}\n{"prompt": "\xff"}\n')


def _truncated_parquet(path: Path) -> None:
    whole = write_verl(path).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("name", "write", "parts"),
    [
        ("a.jsonl", _missing_column, ["a.jsonl", "prompt", "question"]),
        ("b.jsonl", _empty_prompt, ["b.jsonl", "line 2", "empty"]),
        ("c.jsonl", _broken_line, ["c.jsonl", "line 2"]),
        ("d.jsonl", _not_utf8, ["d.jsonl", "line 2", "UTF-8"]),
        ("e.parquet", _truncated_parquet, ["e.parquet"]),
    ],
)
def test_malformed_data_is_refused_with_file_and_row(tmp_path: Path, name: str, write, parts: list[str]):
    write(tmp_path / name)
    with pytest.raises(DataError) as error:
        runs.run(tmp_path / "run", f"data.train={tmp_path / name}")
    for part in parts:
        assert part in str(error.value)
    assert not (tmp_path / "run").exists()


NAN_REWARD = """
def sometimes_nan(completions, answer, **kwargs):
    return [float("nan") if i % 4 == 0 else float(i % 2) for i, _ in enumerate(completions)]
"""


@pytest.mark.parametrize(("policy", "aborted"), [("value", 0.0), ("mask_sample", 0.25), ("drop_group", 1.0)])
def test_a_nan_reward_costs_what_its_policy_says(tmp_path: Path, policy: str, aborted: float):
    (tmp_path / "rewards.py").write_text(NAN_REWARD)
    data = write_trl(tmp_path / "train.jsonl")
    function = f"{{name: '{tmp_path}/rewards.py:sometimes_nan', on_nan: {policy}}}"
    assert runs.run(tmp_path / "run", f"data.train={data}", f"reward.functions=[{function}]", "trainer.max_steps=2")
    step = runs.metrics(tmp_path / "run")[-1]
    assert step["response/aborted_ratio"] == aborted
    assert step["reward_failures/nans/sometimes_nan"] == 4


def test_a_nan_reward_stops_the_run_by_default_and_names_the_function_and_the_sample(tmp_path: Path):
    (tmp_path / "rewards.py").write_text(NAN_REWARD)
    data = write_trl(tmp_path / "train.jsonl")
    with pytest.raises(
        RewardError, match=r"sometimes_nan, .*train\.jsonl, line \d+, sample 0 of its group returned nan"
    ):
        runs.run(tmp_path / "run", f"data.train={data}", f"reward.functions=['{tmp_path}/rewards.py:sometimes_nan']")


def test_a_row_without_an_answer_is_named_before_training(tmp_path: Path):
    path = tmp_path / "train.jsonl"
    rows = [{"prompt": p, "answer": a} for p, a in PROMPTS]
    rows[3]["answer"] = None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"4.*exact_match"):
        runs.run(tmp_path / "run", f"data.train={path}", "reward.functions=[exact_match]")
