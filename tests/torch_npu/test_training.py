"""`hwgrpo train` on the real torch-npu with a virtual NPU, as a user starts it: it computes what a CPU computes.

The backend is chosen by what is installed and by what torch-npu finds; the environment profile of the backend holds,
but for the second thread. Sampling draws no numbers from the device, so the same seed gives the same responses.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hwgrpo_kernels.module_replacement import MODULES

from tests.support.devices import simulated_npu
from tests.support.numbers.rounding import GENTLE, STEP, assert_metrics_close, drift
from tests.support.processes.launch import ROOT
from tests.support.runs import runs
from tests.torch_npu import torch_npu_process, virtual_acl

pytestmark = pytest.mark.slow

WORDS = (
    "model.path=builtin://tiny?task=sort&steps=150&batch=64",
    "model.dtype=float32",
    "trainer.tokens_per_micro_batch=4096",
    "trainer.prompts_per_step=16",
    "trainer.max_steps=2",
    "data.validation_max_rows=8",
    "observe.loggers=[jsonl]",
    "observe.progress=none",
    *GENTLE,
)


def records(output: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Return metrics, completions and environment of a run."""
    completions = [json.loads(line) for line in (output / "completions.jsonl").read_text().splitlines()]
    return runs.metrics(output), completions, json.loads((output / "environment.json").read_text())


def test_the_recipe_trains_on_it_as_on_the_cpu(tmp_path: Path):
    recipe = str(ROOT / "configs/tiny_sort.yaml")
    words = ("-m", "hwgrpo", "train", recipe, *WORDS, f"trainer.output_dir={tmp_path / 'npu'}")
    done = torch_npu_process.run(*words, env=virtual_acl.environment())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    done = simulated_npu.train(recipe, *WORDS, f"trainer.output_dir={tmp_path / 'cpu'}", npus=0)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    on_npu, same, host = records(tmp_path / "npu")
    metrics, completions, _ = records(tmp_path / "cpu")
    assert (host["backend"], host["device"], host["arch"]) == ("npu", "Ascend910B1", "ascend910b1")
    assert host["variables"]["PYTORCH_NPU_ALLOC_CONF"] == {"value": "expandable_segments:True", "set by": "hwgrpo"}
    assert host["attention"]["selected"] == "npu_fusion_attention"
    replaced = host["fused_modules"]["replaced"]
    assert replaced.keys() == set(MODULES)
    assert all(replaced.values()), host["fused_modules"]["skipped"]
    for ours, theirs in zip(same, completions, strict=True):
        assert ours.pop("advantage") == pytest.approx(theirs.pop("advantage"), abs=STEP)
        assert ours == theirs
    assert_metrics_close(on_npu, metrics, drift(2))
    assert all(line["actor/grad_norm"] > 0.1 for line in on_npu if "reward" in line), "nothing was trained"
