"""With a sharding strategy only rank 0 reads the policy, no device holds it in full, and ranks get the right shards."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hwgrpo.models.loading import load_model
from hwgrpo.models.lora import apply_lora
from tests.distributed.loading_worker import make
from tests.support.devices import simulated_npu
from tests.support.models.tiny import settings
from tests.support.processes.deepspeed_package import with_deepspeed
from tests.support.processes.launch import ROOT, forked

FSDP = ["trainer.strategy=fsdp2"]
ZERO = ["trainer.strategy=deepspeed", "trainer.deepspeed.stage=3"]
SERVED = ["rollout.engine=vllm"]
"""No copy that samples in this process."""
LAYERS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models: tied, untied, one with an adapter, and a larger one of equal layers and little else."""
    root = tmp_path_factory.mktemp("models")
    make(root / "tied", tied=True)
    make(root / "untied", tied=False)
    # in bf16, so that who reads it holds it: fp32 weights are used where the file is mapped, and not there before
    large = make(root / "large", tied=True, hidden=512, layers=LAYERS, dtype=torch.bfloat16)
    (root / "bytes").write_text(str(large))
    (root / "rank-0").symlink_to(root / "tied")
    (root / "rank-1").symlink_to(root / "untied")
    shutil.copytree(root / "tied", root / "lacking-0")
    (root / "lacking-0/model.safetensors").unlink()
    (root / "lacking-1").symlink_to(root / "tied")
    config = settings(f"model.path={root}/tied", "model.lora.rank=2")
    adapted = apply_lora(load_model(config.model, attention="sdpa"), config.model.lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    adapted.save_pretrained(str(root / "adapter"))
    return root


def cases(root: Path, strategy: list[str]) -> dict[str, list[str]]:
    tied, untied = (f"model.path={root}/{name}" for name in ("tied", "untied"))
    words = ["algorithm.kl.coef=0.1", "model.dtype=float32", *strategy]
    return {
        "tied, with a reference": [tied, *words],
        "untied, with a reference": [untied, *words],
        "bf16": [untied, "rollout.dtype=float32", "model.dtype=bfloat16", *strategy],
        "new adapters": [tied, "model.lora.rank=2", *words],
        "an adapter trained further": [tied, f"model.lora.adapter={root}/adapter", *words],
        "large": [f"model.path={root}/large", *SERVED, *strategy],
    }


NAMES = list(cases(Path(), []))
REFUSED = {
    "no weights on rank 0": ["model.path=ROOT/lacking-RANK"],
    "other files on rank 1": ["model.path=ROOT/rank-RANK"],
}


def started(root: Path, out: Path, strategy: list[str], backend: str = "cpu", launch: Any = forked, **more: Any):
    worker = str(ROOT / "tests/distributed/loading_worker.py")
    every = cases(root, strategy)
    every |= {name: [word.replace("ROOT", str(root)) for word in words] + strategy for name, words in REFUSED.items()}
    if backend != "cpu":  # where weights are in host memory already
        every["kept on the host"] = [*every[NAMES[0]], "trainer.fsdp2.offload=true"]
    done = launch(2, worker, str(out), backend, json.dumps(every), **more)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(2)] for name in every}


def assert_no_faults(found: dict[str, list[dict[str, Any]]]) -> None:
    ranks = [(name, rank) for name, ranks in found.items() if name not in REFUSED for rank in ranks]
    assert len(ranks) >= 2 * len(NAMES)
    assert [(name, rank["faults"]) for name, rank in ranks if rank["faults"]] == []


@pytest.fixture(scope="module")
def sharded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What two ranks of fsdp2 have."""
    return started(folder, tmp_path_factory.mktemp("fsdp2"), FSDP)


@pytest.mark.parametrize("case", NAMES)
def test_two_ranks_have_the_models_that_one_would_read(sharded, case: str):
    assert [rank["faults"] for rank in sharded[case]] == [[], []]


def test_a_rank_beside_the_first_never_has_the_whole_model_in_memory(sharded, folder: Path):
    assert_half_and_a_layer(sharded["large"][1]["host"], int((folder / "bytes").read_text()))


def test_what_rank_0_finds_wrong_ends_all_ranks_with_its_words(sharded):
    first, second = (rank["error"] for rank in sharded["no weights on rank 0"])
    assert re.match(r"ConfigError: model.path='.*/lacking-0': the folder has no readable model", first)
    assert second == first.replace("ConfigError", "RunError")


def test_a_rank_that_makes_another_model_than_rank_0_says_so(sharded):
    for rank in sharded["other files on rank 1"]:
        assert rank["error"].startswith("RunError: rank 1 makes another Qwen3ForCausalLM of model.path=")


def assert_half_and_a_layer(held: int, whole: int) -> None:
    assert whole / 2 < held < whole / 2 + whole / LAYERS + 0.05 * whole, (held, whole)


@pytest.mark.slow
def test_no_device_ever_holds_the_whole_model(folder: Path, tmp_path: Path):
    """What the allocators of two simulated devices had given out at the most."""
    more = {"packages": [simulated_npu.packages()], "SIMULATED_NPU_DEVICES": "2"}
    found = started(folder, tmp_path, FSDP, "npu", **more)
    assert_no_faults(found)
    for ranks in (found[name] for name in NAMES):
        assert ranks[0]["fused"] == ranks[1]["fused"]
        assert len(ranks[0]["fused"]) > 8, "rank 0 has tried fused modules, and rank 1 has them too"
        assert ranks[0]["fused"][-1].endswith("npu_fusion_attention")
    whole = int((folder / "bytes").read_text())
    for rank in found["large"]:
        assert whole / 2 < rank["device"] < whole / 2 + 1.6 * whole / LAYERS, "shards, a layer, its part"


@pytest.mark.slow
def test_under_zero_3_two_ranks_have_the_models_that_one_would_read(folder: Path, tmp_path: Path):
    found = started(folder, tmp_path, ZERO, launch=with_deepspeed)
    assert_no_faults(found)
    assert_half_and_a_layer(found["large"][1]["host"], int((folder / "bytes").read_text()))
