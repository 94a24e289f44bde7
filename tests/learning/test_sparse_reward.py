"""Where few prompts carry a signal, a step of plain GRPO is mostly noise; filtered groups are not."""

import json
from pathlib import Path

import pytest

from hwgrpo.data.tasks import parse_task
from tests.support.runs import runs

pytestmark = pytest.mark.slow

SOLVABLE, HOPELESS = 16, 240
RUN = (
    "model.path=builtin://tiny?task=sort&hidden=64&layers=2&head=32&steps=200&batch=64&digits=3",
    "rollout.n=8",
    "optim.lr=2e-3",
    "trainer.prompts_per_step=8",
    "trainer.validation_n=4",
    "observe.completions_per_step=0",
    "reward.functions=[exact_match]",
    "data.validation_max_rows=0",
)


def accuracy(folder: Path, *words: str) -> tuple[float, float, float]:
    """Train; return the accuracy of samples on the prompts with a signal before and after, and the sampled tokens."""
    rows = [dict(row) for row in parse_task("task://sort?digits=3").splits["train"][: SOLVABLE + HOPELESS]]
    others = [{**row, "ground_truth": "none"} for row in rows[SOLVABLE:]]
    folder.mkdir()
    files = {"train": rows[:SOLVABLE] + others, "validation": rows[:SOLVABLE]}
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    data = [f"data.{name}={folder / name}.jsonl" for name in files]
    assert runs.forked(lambda: runs.run(folder / "run", *RUN, *data, *words)) == 0
    lines = runs.metrics(folder / "run")
    found = [value for line in lines for name, value in line.items() if name.endswith("/reward/mean@4")]
    steps = [line for line in lines if "response_length/mean" in line]
    tokens = sum(s.get("filter_groups/response_tokens", 8 * 8 * s["response_length/mean"]) for s in steps)
    return found[0], found[-1], tokens


def test_filtered_groups_teach_where_plain_grpo_does_not_learn_from_as_many_tokens(tmp_path: Path):
    words = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_rounds=40", "trainer.max_steps=8")
    before, filtered, tokens = accuracy(tmp_path / "filtered", *words)
    same, plain, as_many = accuracy(tmp_path / "plain", "trainer.max_steps=240")
    assert before == same
    assert filtered > before + 0.3
    assert plain < before + 0.05
    assert as_many > 0.8 * tokens
