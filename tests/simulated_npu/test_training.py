"""`hwgrpo train` on a host with simulated NPUs, as a user starts it: what it computes is what a CPU computes.

Sampling needs no device's random numbers (its uniforms are a hash of seed, prompt and position), so the same seed gives
the same responses. Both compute in fp32 with the same tokens per micro-batch; the kernels may differ, and do.
"""

from pathlib import Path

import pytest

from tests.support.devices import simulated_npu
from tests.support.devices.npu_runs import RECIPE, WORDS, Written, assert_same, read

STEPS, SHARDED_STEPS = 8, 3


def train(output: Path, *more: str, npus: int) -> Written:
    """Return what a run of the recipe on two processes writes."""
    words = (*WORDS, f"trainer.max_steps={STEPS}", f"trainer.output_dir={output}", *more)
    done = simulated_npu.train(RECIPE, *words, npus=npus, ranks=2)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return read(output)


@pytest.mark.slow
def test_the_recipe_trains_on_npus_as_on_the_cpu(tmp_path: Path):
    on_cpu = train(tmp_path / "cpu", npus=0)
    assert on_cpu.environment["backend"] == "cpu"
    on_npu = train(tmp_path / "npu", npus=2)
    device = on_npu.environment
    assert (device["backend"], device["device"], device["arch"]) == ("npu", "Ascend910B3", "ascend910b3")
    assert len(on_npu.metrics) == len(on_cpu.metrics) == STEPS + 2
    assert_same(on_npu, on_cpu)
    drifts = [line["actor/kl_loss"] for line in on_npu.metrics if "actor/kl_loss" in line]
    assert 0 <= drifts[0] < 1e-3 * drifts[-1], "the policy has not moved, so nothing is tested"


@pytest.mark.slow
def test_a_policy_cut_over_two_npus_trains_as_whole_ones_on_the_cpu_with_sequences_shared_or_not(tmp_path: Path):
    steps = f"trainer.max_steps={SHARDED_STEPS}"
    on_cpu = train(tmp_path / "cpu", steps, npus=0)
    for size in (1, 2):
        words = (steps, "trainer.strategy=fsdp2", f"trainer.sequence_parallel_size={size}")
        words += ("trainer.offload=optimizer",) if size == 2 else ()
        on_npu = train(tmp_path / f"npu {size}", *words, npus=2)
        assert on_npu.environment["backend"] == "npu"
        assert len(on_npu.metrics) == len(on_cpu.metrics) == SHARDED_STEPS + 2
        assert_same(on_npu, on_cpu)
