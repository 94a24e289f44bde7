"""Training on the device: a short run with each setting that changes what the device computes, and a CPU's numbers."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hwgrpo_backends import choose
from hwgrpo_backends.cpu import BACKEND as CPU

from tests.support.runs import runs

REPO = Path(__file__).parents[2]
BACKEND = choose().backend
SETTINGS = {
    "plain": [],
    "fp32": ["model.dtype=float32", "rollout.dtype=float32"],
    "decode graphs": ["rollout.graphs=true", "rollout.max_response_tokens=24"],
    "no decode graphs": ["rollout.graphs=false"],
    "fused modules": ["model.fused_modules=[rms_norm,rotary,swiglu]"],
    "deterministic": ["trainer.deterministic=true"],
    "lora": ["model.lora.rank=8"],
    "dora": ["model.lora.rank=8", "model.lora.dora=true"],
    "nf4": ["model.lora.rank=8", "model.quantize=nf4"],
    "int8": ["model.lora.rank=8", "model.quantize=int8"],
    "offloaded optimizer": ["trainer.offload=optimizer"],
    "8-bit optimizer": ["optim.name=adamw_8bit"],
    "muon": ["optim.name=muon"],
    "checkpointing": ["model.gradient_checkpointing=true"],
    "padded": ["model.layout=padded"],
    "packed": ["model.layout=packed"],
    "grouped": ["model.layout=grouped"],
    "grouped with a mask": ["model.layout=grouped_masked"],
    "eager attention": ["model.attention=eager"],
    "kl": ["algorithm.kl.coef=0.1"],
    "exact kl": ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=exact"],
    "optimal token baseline": ["algorithm.advantage.name=optimal_token_baseline"],
    "gspo": ["algorithm.preset=gspo"],
    "remax": ["algorithm.preset=remax"],
    "entropy": ["algorithm.entropy_coef=0.01", "algorithm.top_entropy_share=0.5"],
    "filters": ["rollout.top_k=5", "rollout.top_p=0.9", "rollout.min_p=0.01", "rollout.temperature=0.7"],
    "stale responses": ["rollout.max_staleness=1", "algorithm.correction.name=token_truncate"],
}
STRATEGIES = {
    "ddp": [],
    "fsdp2": [],
    "fsdp2 offloaded": ["trainer.fsdp2.offload=true"],
    "deepspeed 2": ["trainer.deepspeed.stage=2"],
    "deepspeed 3": ["trainer.deepspeed.stage=3"],
}


@pytest.fixture(autouse=True)
def _tensors_are_made_on_the_device():
    """Runs place their tensors themselves."""


def steps(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "actor/grad_norm" in line]


def assert_trained(folder: Path) -> None:
    assert len(steps(folder)) == 2
    assert all(math.isfinite(step["actor/grad_norm"]) and math.isfinite(step["actor/loss"]) for step in steps(folder))
    assert any(step["actor/grad_norm"] > 0 for step in steps(folder))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_with_the_setting_trains(name, tmp_path):
    assert runs.run(tmp_path / "run", *SETTINGS[name], "trainer.max_steps=2", backend=BACKEND) == "completed"
    assert_trained(tmp_path / "run")


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_of_one_rank_trains(name, tmp_path):
    strategy = name.split()[0]
    if strategy == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    words = [*runs.SMALL, *STRATEGIES[name], f"trainer.strategy={strategy}", "trainer.max_steps=2"]
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
        "-m",
        "hwgrpo",
        "train",
        "tiny_sort",
    ]
    done = subprocess.run(
        [sys.executable, *launch, *words, f"trainer.output_dir={tmp_path / 'run'}", f"backend.name={BACKEND.name}"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_trained(tmp_path / "run")


def test_an_fp32_run_has_the_numbers_of_a_cpu(tmp_path):
    for backend, name in ((BACKEND, "device"), (CPU, "cpu")):
        assert runs.run(tmp_path / name, *SETTINGS["fp32"], "trainer.max_steps=2", backend=backend) == "completed"
    for here, there in zip(steps(tmp_path / "device"), steps(tmp_path / "cpu"), strict=True):
        assert here["reward"] == there["reward"]
        assert abs(here["actor/loss"] - there["actor/loss"]) <= 1e-5
        assert abs(here["actor/grad_norm"] - there["actor/grad_norm"]) <= 1e-4 * there["actor/grad_norm"]


def test_a_deterministic_run_repeats_itself_to_the_last_digit(tmp_path):
    for name in ("once", "again"):
        runs.run(tmp_path / name, *SETTINGS["deterministic"], "trainer.max_steps=2", backend=BACKEND)
    once, again = (
        [{key: value for key, value in step.items() if not key.startswith(("timing", "perf"))} for step in each]
        for each in map(steps, (tmp_path / "once", tmp_path / "again"))
    )
    assert once == again
