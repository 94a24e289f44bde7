"""The KL over the full vocabulary does not depend on ranks, nor on how a strategy shards policy and reference."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hwgrpo.training.strategies.single import Single
from tests.distributed.exact_kl_worker import CASES, run_case
from tests.support.models.steps import CPU
from tests.support.numbers.rounding import BF16, STEP, assert_gradients_close, drift
from tests.support.processes.deepspeed_package import with_deepspeed
from tests.support.processes.launch import ROOT, forked

FSDP2 = ["fsdp2", "trainer.strategy=fsdp2"]
ZERO = ["deepspeed", "trainer.strategy=deepspeed"]
ZERO += [f"trainer.deepspeed.config={ROOT}/tests/support/runs/deepspeed.json"]  # which shards small weights, too
WAYS = {
    "ddp": ["ddp"],
    "ddp, sequences shared": ["ddp", "trainer.strategy=ddp", "trainer.sequence_parallel_size=2"],
    "fsdp2": FSDP2,
    "fsdp2, each update": [*FSDP2, "trainer.fsdp2.sync_every=update"],
    "fsdp2, weights kept": [*FSDP2, "trainer.fsdp2.reshard_after_forward=false"],
}
TENSOR = {"fsdp2, layers cut": [*FSDP2, "trainer.tensor_parallel_size=2"]}
ZERO_WAYS = {f"zero-{stage}": [*ZERO, f"trainer.deepspeed.stage={stage}"] for stage in (1, 2, 3)}
FULL = [case for case in CASES if "adapters" not in case]
"""Cases without adapters, which tensor parallelism does not shard."""
FAST = [(way, case) for way in WAYS for case in CASES] + [(way, case) for way in TENSOR for case in FULL]
SLOW = [(way, case) for way in ZERO_WAYS for case in CASES]


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    for ways, cases in ((WAYS, list(CASES)), (TENSOR, FULL)):
        done = forked(2, "tests/distributed/exact_kl_worker.py", str(out), json.dumps(ways), json.dumps(cases))
        assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def by_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    words = ("tests/distributed/exact_kl_worker.py", str(out), json.dumps(ZERO_WAYS), json.dumps(list(CASES)))
    done = with_deepspeed(2, *words)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, torch.Tensor]]:
    return {case: run_case(Single(CPU, "gloo"), case) for case in CASES}


@pytest.mark.parametrize(("way", "case"), FAST)
def test_two_ranks_compute_what_one_does(way: str, case: str, alone, fast: Path):
    assert_same(load_file(fast / f"{way} {case}"), alone[case], BF16 if case == "bf16" else STEP)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "case"), SLOW)
def test_deepspeed_computes_what_one_process_does(way: str, case: str, alone, by_deepspeed: Path):
    assert_same(load_file(by_deepspeed / f"{way} {case}"), alone[case], BF16 if case == "bf16" else STEP)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rounding: float) -> None:
    assert found.keys() == expected.keys()
    for update, limit in (("", rounding), ("again.", rounding * drift(1) / STEP)):
        names = [name for name in expected if name.startswith(f"{update}grad.")]
        assert names
        assert_gradients_close({name: found[name] for name in names}, {name: expected[name] for name in names}, limit)
        tokens = float(expected[f"{update}sum.tokens"])
        assert float(expected[f"{update}sum.kl"]) > 1e-3 * tokens
        for key, size in (("loss", 1.0), ("sum.kl", tokens)):
            name = f"{update}{key}"
            assert float(found[name]) == pytest.approx(float(expected[name]), rel=limit, abs=limit * size), name
