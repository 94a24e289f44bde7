"""`hwgrpo train --from trl` with DeepSpeed: by the argument of TRL, and by the variables of `accelerate launch`."""

import json
from pathlib import Path
from typing import Any

import pytest

from hwgrpo.config.yaml_text import read_yaml
from hwgrpo.models.loading import resolve_model_path
from tests.support.numbers.rounding import GENTLE, assert_metrics_close, drift
from tests.support.processes.deepspeed_package import with_deepspeed
from tests.support.runs import runs

FILE = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
ACCELERATE = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
MODEL = "builtin://tiny?task=sort"
SETTINGS = f"""
model_name_or_path: {MODEL}
dataset_name: task://sort
num_generations: 4
per_device_train_batch_size: 8
max_completion_length: 8
learning_rate: 1.0e-4
beta: 0.04
max_steps: 2
bf16: false
use_cpu: true
"""


@pytest.mark.slow
def test_zero_1_of_a_file_and_zero_3_of_accelerate_train_alike(tmp_path: Path):
    resolve_model_path(MODEL)  # two ranks that need it at once would each make it
    (tmp_path / "zero.json").write_text(json.dumps(FILE))
    (tmp_path / "grpo.yaml").write_text(SETTINGS)
    found = {}
    for stage, more, variables in (
        (1, [f"deepspeed={tmp_path}/zero.json"], {}),
        (3, [], ACCELERATE),
    ):
        output = tmp_path / f"zero-{stage}"
        ours = ["reward.functions=[exact_match]", *GENTLE, f"trainer.output_dir={output}", "data.validation_max_rows=4"]
        words = ["-m", "hwgrpo", "train", "--from", "trl", str(tmp_path / "grpo.yaml"), *more]
        done = with_deepspeed(2, *words, *(part for each in ours for part in ("--set", each)), **variables)
        assert done.returncode == 0, done.stderr[-3000:]
        written = read_yaml((output / "config.yaml").read_text(), "config.yaml", Any)
        assert written["trainer"]["strategy"] == "deepspeed"
        assert written["trainer"]["deepspeed"]["stage"] == stage
        found[stage] = runs.metrics(output)
    assert {each["step"] for each in found[1]} == {0, 1, 2}
    assert_metrics_close(found[1], found[3], drift(2))
