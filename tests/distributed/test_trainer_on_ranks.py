"""`hwgrpo.Trainer` under torchrun: every rank makes the same one, several after one another."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hwgrpo.data.tasks import parse_task
from tests.support.processes.launch import ROOT, forked
from tests.support.runs import runs


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_objects_on_two_ranks_are_the_run_of_the_command_and_one_rank_may_stop(strategy: str, tmp_path: Path):
    (tmp_path / "recipe.yaml").touch()
    for name, rows in parse_task("task://sort?digits=3").splits.items():
        lines = [json.dumps(dict(row)) + "\n" for row in rows[:16]]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    worker = str(ROOT / "tests/distributed/trainer_worker.py")
    done = forked(2, worker, str(tmp_path), strategy)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert ranks[0]["status"] == "completed"
    assert ranks[0]["responses"] == [8, 8], "half of the 16"
    assert ranks[0]["stopped"] == ["interrupted", 1]
    weights = {
        name: load_file(tmp_path / name / "model.safetensors")
        for name in ("command/final", "objects/final", "saved", "given")
    }
    expected = weights.pop("command/final")
    for name, found in weights.items():
        assert all(found[key].equal(expected[key]) for key in expected), name
    renamed = [
        {key.replace("validation.jsonl", "validation"): value for key, value in line.items()}
        for line in runs.metrics(tmp_path / "command")
    ]
    assert runs.metrics(tmp_path / "objects") == renamed
