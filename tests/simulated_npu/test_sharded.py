"""A policy sharded over two simulated NPUs by DeepSpeed, and one offloaded to the host, train as unsharded on CPUs.

test_training.py has the same for FSDP2 with its parts on the NPUs.
"""

import json
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.devices import simulated_npu
from tests.support.devices.npu_runs import RECIPE, WORDS, Written, assert_same, read
from tests.support.processes import deepspeed_package
from tests.support.processes.launch import ROOT, forked

ZERO = {stage: ("trainer.strategy=deepspeed", f"trainer.deepspeed.stage={stage}") for stage in (1, 2, 3)}
OPTIMIZER, PARAMETERS = "trainer.deepspeed.offload_optimizer=true", "trainer.deepspeed.offload_parameters=true"
WAYS = {f"zero-{stage}": words for stage, words in ZERO.items()} | {
    "zero-2, optimizer on the host": (*ZERO[2], OPTIMIZER),
    "zero-3, all on the host": (*ZERO[3], OPTIMIZER, PARAMETERS),
    "fsdp2, all on the host": ("trainer.strategy=fsdp2", "trainer.fsdp2.offload=true"),
    "sequences shared, all on the host": (
        *("trainer.strategy=fsdp2", "trainer.sequence_parallel_size=2", "trainer.fsdp2.offload=true"),
    ),
    "layers cut": ("trainer.strategy=fsdp2", "trainer.tensor_parallel_size=2"),
    "layers cut, all on the host": (
        *("trainer.strategy=fsdp2", "trainer.tensor_parallel_size=2", "trainer.fsdp2.offload=true"),
    ),
}
STEPS = 2  # the second samples and validates with what the first has learned
pytestmark = pytest.mark.slow


def trained(folder: Path, ways: dict[str, tuple[str, ...]], comm: str, npus: int) -> dict[str, Written]:
    """Return what runs of each way on two processes wrote; the processes are started once."""
    shared = (*WORDS, f"trainer.max_steps={STEPS}")
    each = [[RECIPE, *shared, *words, f"trainer.output_dir={folder / way}"] for way, words in ways.items()]
    done = started(each, comm, npus, ASCEND_HOME_PATH=str(folder))  # DeepSpeed looks for CANN there as it starts
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {way: read(folder / way) for way in ways}


def started(
    runs: list[list[str]], comm: str, npus: int, worker: str = "support/runs/train_worker.py", **variables: str
) -> CompletedProcess[str]:
    """Start two processes that do one run after another."""
    return forked(
        2,
        *(str(ROOT / "tests" / worker), comm, json.dumps(runs)),
        packages=[simulated_npu.packages(), *deepspeed_package.folders()] if npus else [],
        SIMULATED_NPU_DEVICES=str(npus),
        HWGRPO_BACKEND_SELECTED="npu" if npus else "cpu",  # as `hwgrpo launch` sets it
        **variables,
    )


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return trained(tmp_path_factory.mktemp("cpu"), {"ddp": ("trainer.strategy=ddp",)}, "gloo", 0)["ddp"]


@pytest.fixture(scope="module")
def on_npus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    return trained(tmp_path_factory.mktemp("npu"), WAYS, "hccl", 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_policy_cut_over_two_npus_trains_as_whole_ones_on_cpus(
    way: str, on_npus: dict[str, Written], on_cpus: Written
):
    device = on_npus[way].environment
    assert (on_cpus.environment["backend"], device["backend"], device["device"]) == ("cpu", "npu", "Ascend910B3")
    assert ("deepspeed" in device) == way.startswith("zero")
    assert len(on_npus[way].metrics) == len(on_cpus.metrics) == STEPS + 2
    assert max(abs(line.get("actor/pg_loss", 0)) for line in on_cpus.metrics) > 1e-4, "nothing changes"
    assert_same(on_npus[way], on_cpus)


def test_npus_that_share_sequences_attend_by_the_fused_operator_and_train_as_one_process_does(tmp_path: Path):
    shared = ("trainer.strategy=fsdp2", "trainer.sequence_parallel_size=2")
    words = (*WORDS, f"trainer.max_steps={STEPS}")
    done = started(
        [[RECIPE, *words, *shared, f"trainer.output_dir={tmp_path / 'npus'}"]],
        "hccl",
        2,
        "simulated_npu/fused_train_worker.py",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    alone = simulated_npu.train(RECIPE, *words, f"trainer.output_dir={tmp_path / 'cpu'}")
    assert alone.returncode == 0, alone.stdout[-2000:] + alone.stderr[-4000:]
    on_npus, on_cpu = read(tmp_path / "npus"), read(tmp_path / "cpu")
    assert on_npus.environment["attention"] == {"selected": "npu_fusion_attention", "skipped": {}}
    counts = [json.loads(text) for text in re.findall(r"heads (\{.*?\})", done.stdout)]  # ranks share the lines
    assert len(counts) == 2, done.stdout
    # half of the four heads while sequences are shared: two layers, for the reference and the update of each step
    assert all(heads.get("2", 0) >= 2 * 2 * STEPS for heads in counts), counts
    assert len(on_npus.metrics) == STEPS + 2
    assert_same(on_npus, on_cpu)


def test_without_the_variables_of_cann_deepspeed_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    done = started([[RECIPE, *WORDS, *ZERO[1], f"trainer.output_dir={tmp_path / 'run'}"]], "hccl", 2)
    assert done.returncode != 0
    assert "trainer.strategy='deepspeed': DeepSpeed finds CANN by the variable ASCEND_HOME_PATH" in done.stderr
    assert "source the set_env.sh of CANN" in done.stderr
    assert not (tmp_path / "run").exists()
