"""A run's peak of resident memory against its plan: the smallest size of benchmarks/memory.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_peak_of_a_small_run_is_planned_within_a_tenth(tmp_path):
    file = tmp_path / "results.json"
    script = REPO / "benchmarks" / "memory.py"
    command = [sys.executable, script, "--size", "36m", "--output", file, "rollout.n=2"]
    subprocess.run(command, check=True, cwd=tmp_path)
    [result] = json.loads(file.read_text())["results"]
    assert set(result["off"]) == {"malloc as it is", "freed at once"}
    for allocator, peak in result["peak"].items():
        assert result["planned_peak"][allocator] == pytest.approx(peak, rel=0.1), allocator
        assert peak > 1.4 * result["state_bytes"], "activations count, too"


def test_the_published_peak_of_adapters_on_a_base_in_bf16_is_half_of_that_on_one_in_fp32_and_planned_within_a_tenth():
    document = json.loads((REPO / "benchmarks" / "results" / "memory_lora_cpu.json").read_text())
    assert len(document["results"]) == 6
    for result in document["results"]:
        peak = result["peak"]["freed at once"]
        assert result["planned_peak"]["freed at once"] == pytest.approx(peak, rel=0.1), (result["size"], result["row"])
    fp32_base, bf16_base = (result["peak"] for result in document["results"] if result["size"] == "285m")
    assert bf16_base["freed at once"] <= 0.5 * fp32_base["freed at once"]


def test_the_published_figures_are_within_a_tenth_and_one_model_is_of_a_gigabyte():
    document = json.loads((REPO / "benchmarks" / "results" / "memory_cpu.json").read_text())
    assert len(document["results"]) == 3
    assert max(4 * result["parameters"] for result in document["results"]) > 2**30
    for result in document["results"]:
        for allocator, peak in result["peak"].items():
            assert result["planned_peak"][allocator] == pytest.approx(peak, rel=0.1), (result["size"], allocator)


def test_the_published_runs_of_recipes_are_within_a_tenth_and_none_is_left_out():
    document = json.loads((REPO / "benchmarks" / "results" / "memory_variants_cpu.json").read_text())
    assert len({result["row"] for result in document["results"]}) == 9
    for result in document["results"]:
        peak = result["peak"]["freed at once"]
        assert result["planned_peak"]["freed at once"] == pytest.approx(peak, rel=0.1), (result["size"], result["row"])
