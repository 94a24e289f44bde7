"""vLLM in the training process, one engine of several ranks: they sample as with an engine each."""

import math
from pathlib import Path
from typing import Any

import pytest

from hwgrpo.config import load_config
from hwgrpo.config.validate import check_world_size
from hwgrpo.errors import ConfigError
from tests.support.processes import ranks
from tests.support.runs import runs
from tests.support.servers.vllm_double import Memory, installed

RUN = (
    "model.path=builtin://tiny?task=sort&hidden=64&layers=2&head=32&steps=30&batch=32&digits=3",
    "rollout.engine=vllm",
    "rollout.probe_every=1",
    "trainer.strategy=ddp",
    "trainer.max_steps=2",
    "trainer.validate_every=1",
    "data.validation_max_rows=1",  # of which the second rank has none
)
SHARED = "rollout.tensor_parallel_size=2"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a run leaves in which every rank has an engine."""
    return train(tmp_path_factory.mktemp("alone"))


def train(folder: Path, *words: str) -> dict[str, Any]:
    def body(rank: int) -> None:
        with installed(Memory(states=math.inf)) as memory:
            runs.run(folder / "run", *RUN, *words)
        assert memory.arguments["distributed_executor_backend"] == "external_launcher"
        assert memory.arguments["tensor_parallel_size"] == (2 if SHARED in words else 1)

    assert ranks.forked(2, body) == [0, 0]
    return runs.everything(folder / "run")


def test_two_ranks_with_one_engine_train_as_with_an_engine_each(tmp_path, alone):
    assert train(tmp_path, SHARED) == alone


def test_an_adapter_of_two_ranks_is_sampled_with(tmp_path):
    words = ("model.lora.rank=4", "optim.lr=1e-2")
    assert train(tmp_path / "shared", SHARED, *words) == train(tmp_path / "each", *words)


def config(*words: str) -> Any:
    return load_config("tiny_sort", ["rollout.engine=vllm", *words])


def test_ranks_that_cannot_be_divided_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 .* does not divide the run's 4 ranks.*vllm_server"):
        check_world_size(config("rollout.tensor_parallel_size=3"), 4)
    check_world_size(config(SHARED), 4)
    check_world_size(config("rollout.engine=vllm_server", "rollout.tensor_parallel_size=3"), 4)

    def body(rank: int) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        with (
            installed(Memory(states=math.inf)),
            pytest.raises(ConfigError, match="does not divide the 1 ranks of this"),
        ):
            runs.run(tmp_path / "run", *RUN, SHARED)

    assert ranks.forked(2, body) == [0, 0]


def test_an_engine_of_several_ranks_neither_samples_ahead_nor_has_deadlines():
    ahead = ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .*max_staleness=1: .*; use rollout.engine=vllm_ser"):
        config(SHARED, *ahead)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=2 .*group_timeout=9: .*; use rollout.engine=vllm_serv"
    ):
        config(SHARED, "rollout.group_timeout=9")
