"""Communicated bytes of a run's state, counted at the calls of torch.distributed, equal the plan's."""

import json

import pytest
import torch
from hwgrpo_backends.peaks import NVIDIA

from hwgrpo.planning.memory import Work
from hwgrpo.planning.model_shape import model_shape
from hwgrpo.planning.planned_sharding import planned_sharding, sharding_of
from hwgrpo.planning.step_time import Rates, step_seconds
from tests.support.models.tiny import settings, tiny_llama
from tests.support.processes.deepspeed_package import with_deepspeed
from tests.support.processes.launch import ROOT

RANKS = 2
EAGER = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
}
"""Nothing is kept from one use to the next, as nearly nothing is of a model that is worth cutting."""
FSDP2 = ("fsdp2", "trainer.strategy=fsdp2")
OF_FSDP2 = {
    "fsdp2, weights kept": "trainer.fsdp2.reshard_after_forward=false",
    "fsdp2, each update": "trainer.fsdp2.sync_every=update",
}
WAYS = {"ddp": ("ddp",), "fsdp2": FSDP2, **{way: (*FSDP2, word) for way, word in OF_FSDP2.items()}} | {
    f"zero{stage}": ("deepspeed", "trainer.strategy=deepspeed", f"trainer.deepspeed.stage={stage}")
    for stage in (1, 2, 3)
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, float]]]:
    """Micro-batches and bytes of two updates, by way; the ranks are started once."""
    folder = tmp_path_factory.mktemp("sent")
    (folder / "eager.json").write_text(json.dumps({"zero_optimization": EAGER}))
    ways = {way: list(words) for way, words in WAYS.items()}
    ways["zero3"].append(f"trainer.deepspeed.config={folder / 'eager.json'}")
    done = with_deepspeed(
        RANKS, str(ROOT / "tests/distributed/sent_worker.py"), str(folder / "sent.json"), json.dumps(ways)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "sent.json").read_text())


@pytest.mark.parametrize("way", WAYS)
def test_ranks_send_what_a_plan_says(way: str, counted: dict[str, list[tuple[int, float]]]):
    (one, _), (several, _) = counted[way]
    assert one == 1 < several
    for micro_batches, sent in counted[way]:
        # fsdp2 leaves the last of the two layers whole between a forward and its backward
        assert sent == pytest.approx(planned(way, micro_batches), rel=0.05 if way == "fsdp2" else 0.01)


def planned(way: str, micro_batches: int) -> float:
    """Return the bytes of an update, each response a micro-batch, as counted: a ring sends 1 / RANKS less of them."""
    config = settings(f"rollout.n={micro_batches}", "algorithm.advantage.singleton=raw")
    of_fsdp2 = settings("trainer.strategy=fsdp2", *filter(None, (OF_FSDP2.get(way),)))
    sharding = sharding_of(of_fsdp2.trainer, RANKS) if way in OF_FSDP2 else planned_sharding(way, RANKS)
    work = Work(dtype=torch.float32, device_type="cpu", prompts=1, prompt_tokens=16, micro_batch_tokens=16)
    seconds = step_seconds(
        config,
        model_shape(config.model, tiny_llama().config),
        None,
        work,
        sharding,
        NVIDIA[0],
        Rates(link=1.0),
        devices=RANKS,
        samplers=0,
    )
    assert seconds["exchange"] is not None
    return seconds["exchange"] * RANKS / (RANKS - 1)
