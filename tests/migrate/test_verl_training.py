"""A run script in the form of verl's examples trains on the CPU with a local model, its data and its rewards."""

import json
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from hwgrpo.cli.main import main
from hwgrpo.config.schema import ModelConfig
from hwgrpo.migrate.imports.shell_script import read_script
from hwgrpo.models.loading import load_model, load_tokenizer

SCRIPT = Path(__file__).with_name("run_tiny_text.sh")
MODEL = "builtin://tiny?task=sort&hidden=32&layers=1&steps=40&batch=32&digits=2"
SOURCES = {"gsm8k": "DigitalLearningGmbH/MATH-lighteval", "math": "math_dapo"}
"""Folder of the script -> data_source of its rows; a wrong answer is 0 in the first and -1 in the second."""
DIGITS = ("31", "92", "77", "61", "40", "85", "23", "50")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data in verl's columns and a model that sorts digits, at times."""
    for name, source in SOURCES.items():
        for split in ("train", "test"):
            rows = [
                {
                    "data_source": source,
                    "prompt": [{"role": "user", "content": f"sort {digits}="}],
                    "ability": "math",
                    "reward_model": {"style": "rule", "ground_truth": "".join(sorted(digits))},
                    "extra_info": {"split": split, "index": i},
                }
                for i, digits in enumerate(DIGITS)
            ]
            (tmp_path / name).mkdir(exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / name / f"{split}.parquet")
    builtin = ModelConfig(path=MODEL)
    load_model(builtin, attention="sdpa").save_pretrained(tmp_path / "model")
    load_tokenizer(builtin).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("DATA_HOME", str(tmp_path))
    return tmp_path


def test_a_run_script_of_verl_trains_with_a_local_model(home: Path, capsys: pytest.CaptureFixture[str]):
    model = home / "model"
    ours = (f"model.path={model}", "observe.loggers=[jsonl]", "trainer.threads=1", "optim.lr=1e-3")
    command = ["train", "--from", "verl", str(SCRIPT), "data.seed=3", "trainer.total_epochs=1"]
    assert main([*command, *(part for each in ours for part in ("--set", each))]) == 0
    shown = capsys.readouterr()
    assert "else the local engine" in " ".join(shown.err.split())
    assert "rollout.engine=local (auto)\nwithout effect with rollout.engine=local, and left out:" in shown.out
    run = home / "ckpts"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["rollout"]["engine"] == "local"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in lines if "actor/loss" in each]
    assert [each["step"] for each in steps] == [1, 2]  # 16 prompts, 8 a step
    assert all(each["actor/grad_norm"] > 0 for each in steps)
    assert f"val-core/{SOURCES['gsm8k']}/reward/mean@2" in lines[-1]
    samples = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    wrong = {each["source"]: each["reward"] for each in samples if each["reward"] < 1}
    assert wrong == {SOURCES["gsm8k"]: 0.0, SOURCES["math"]: -1.0}
    assert {each["reward"] for each in samples} == {0.0, -1.0, 1.0}
    before, after = (AutoModelForCausalLM.from_pretrained(each) for each in (model, run / "final"))
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        ((), {}),
        (("trainer.total_epochs=3", "data.seed=4"), {"NGPUS_PER_NODE": "1", "MODEL_PATH": "/models/tiny"}),
        (("a.b=1 2",), {"DATA_HOME": "/data/sets", "NNODES": "2", "ROLLOUT_NAME": "sglang"}),
    ],
)
def test_the_settings_of_the_script_are_those_that_bash_passes(
    arguments: tuple[str, ...], environment: dict[str, str], tmp_path: Path
):
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", **environment}
    python = tmp_path / "python3.sh"
    python.write_text("python3() { printf '%s\\n' \"$@\"; }\ntee() { cat; }\n")
    passed = subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={**environment, "BASH_ENV": str(python)},
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = [each for each in passed.stdout.splitlines() if "=" in each and not each.startswith("+")]
    ours = read_script(SCRIPT.read_text(), SCRIPT.name, arguments, environment).arguments
    named = [each for each in ours if not each.startswith("trainer.experiment_name=")]  # which has the date
    assert len(theirs) >= 39
    assert named == [each for each in theirs if not each.startswith("trainer.experiment_name=")]
