"""`hwgrpo train` on a host with simulated NPUs, as a user starts it: what it computes is what a CPU computes.

Sampling needs no device's random numbers (its uniforms are a hash of seed, prompt and position), so the same seed gives
the same responses. Both compute in fp32 with the same tokens per micro-batch; the kernels may differ, and do.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import simulated_npu
from launch import ROOT

STEPS = {1: 20, 2: 20}
SHARDED_STEPS = 6
WORDS = (
    "model.path=builtin://tiny?task=sort&steps=150&batch=64",
    "model.dtype=float32",
    "trainer.tokens_per_micro_batch=4096",
    "trainer.prompts_per_step=32",
    "data.validation_max_rows=32",
    "observe.loggers=[jsonl]",
    "observe.progress=none",
)
ROUGH = ("rollout_corr/", "actor/grad_norm")
"""Metrics in which rounding grows: perplexities, by one unlikely response, and a norm of sums that nearly cancel."""


def train(
    output: Path, *more: str, npus: int, ranks: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Return metrics, completions and environment of a run of the recipe."""
    words = (*WORDS, f"trainer.max_steps={STEPS[ranks]}", f"trainer.output_dir={output}", *more)
    done = simulated_npu.train(str(ROOT / "configs/tiny_sort.yaml"), *words, npus=npus, ranks=ranks)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    completions = [json.loads(line) for line in (output / "completions.jsonl").read_text().splitlines()]
    return runs.metrics(output), completions, json.loads((output / "environment.json").read_text())


def assert_same(
    on_npu: list[dict[str, Any]], on_cpu: list[dict[str, Any]], same: list[dict[str, Any]], other: list[dict[str, Any]]
) -> None:
    """Compare metrics, and completions (`same`, `other`) with their advantages."""
    for ours, theirs in zip(same, other, strict=True):
        assert ours.pop("advantage") == pytest.approx(theirs.pop("advantage"), abs=1e-5)
        assert ours == theirs
    for ours, theirs in zip(on_npu, on_cpu, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            tolerance = 2e-4 if name.startswith(ROUGH) else 1e-5
            assert ours[name] == pytest.approx(value, rel=tolerance, abs=tolerance), (theirs["step"], name)


@pytest.mark.parametrize("ranks", STEPS)
def test_the_recipe_trains_on_npus_as_on_the_cpu(tmp_path: Path, ranks: int):
    metrics, completions, host = train(tmp_path / "cpu", npus=0, ranks=ranks)
    assert host["backend"] == "cpu"
    on_npu, same, device = train(tmp_path / "npu", npus=ranks, ranks=ranks)
    assert (device["backend"], device["device"], device["arch"]) == ("npu", "Ascend910B3", "ascend910b3")
    assert len(on_npu) == len(metrics) == STEPS[ranks] + 2
    assert_same(on_npu, metrics, same, completions)
    rewards = [line["reward"] for line in on_npu if "reward" in line]
    assert 0 < rewards[0] < rewards[-1], "nothing was learned, so nothing is tested"


def test_a_policy_cut_over_two_npus_trains_as_whole_ones_on_the_cpu_with_sequences_shared_or_not(tmp_path: Path):
    steps = f"trainer.max_steps={SHARDED_STEPS}"
    metrics, completions, _ = train(tmp_path / "cpu", steps, npus=0, ranks=2)
    for size in (1, 2):
        words = (steps, "trainer.strategy=fsdp2", f"trainer.sequence_parallel_size={size}")
        on_npu, same, device = train(tmp_path / f"npu {size}", *words, npus=2, ranks=2)
        assert device["backend"] == "npu"
        assert len(on_npu) == len(metrics) == SHARDED_STEPS + 2
        assert_same(on_npu, metrics, same, [dict(line) for line in completions])
