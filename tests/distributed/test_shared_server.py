"""Ranks that share rollout servers, in other processes: a run of two is the run of one, in turns and overlapped."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from safetensors.torch import load_file

from hwgrpo.errors import RunError
from hwgrpo.rollout.local import engine as local_engine
from hwgrpo.rollout.server.weights_folder import WeightsFolder
from hwgrpo.training.finish import finish
from hwgrpo.training.loop import train
from hwgrpo.training.setup import build_run
from tests.support.numbers.rounding import GENTLE, LOGITS, STEP, assert_gradients_close, assert_metrics_close, drift
from tests.support.processes import ranks
from tests.support.runs import runs
from tests.support.servers import model_server
from tests.support.servers.fake_server import TOKEN

MODEL = next(word for word in runs.SMALL if word.startswith("model.path=")).removeprefix("model.path=")
AHEAD = ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate")
STEPS = 3
COMMON = (f"trainer.max_steps={STEPS}", "trainer.prompts_per_update=2", "observe.completions_per_step=64", *GENTLE)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWGRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def server(_cache):
    with model_server.served(MODEL) as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWGRPO_SERVER_TOKEN", TOKEN)
        yield address


def served(server: model_server.Address, *more: str) -> tuple[str, ...]:
    address = ("rollout.engine=vllm_server", f"rollout.server.url={server.url}", "rollout.server.request_timeout=60")
    return (*COMMON, *address, *more)


def two(output: Path, *words: str) -> None:
    def body(rank: int) -> None:
        parts = build_run(runs.small(output, *words), BACKEND, rank, 2)
        try:
            status = train(parts)
            finish(parts, status)
        finally:
            parts.close()
            parts.strategy.close()

    assert ranks.forked(2, body) == [0, 0]


def one(output: Path, *words: str) -> None:
    assert runs.forked(lambda: runs.run(output, *words)) == 0


def assert_same_run(two: Path, one: Path) -> None:
    ours, theirs = runs.metrics(two), runs.metrics(one)
    assert len(ours) == len(theirs) == STEPS + 2
    assert_metrics_close(ours, theirs, drift(2 * STEPS), without=("rollout/server",))
    finals = [next(each.glob("final*/*.safetensors")) for each in (two, one)]
    assert_gradients_close(load_file(finals[0]), load_file(finals[1]), drift(2 * STEPS))


def assert_sampled_with_the_policy(output: Path) -> None:
    """The trainer's log-probs of a response are the server's: no rank was given responses of other weights."""
    gaps = [abs(line["rollout_corr/kl"]) for line in runs.metrics(output) if "rollout_corr/kl" in line]
    assert len(gaps) == STEPS
    assert max(gaps) < STEP * LOGITS


@pytest.fixture(scope="module")
def alone(server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("alone") / "run"
    one(output, *served(server))
    return output


@pytest.fixture(scope="module")
def ahead_alone(_cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("ahead") / "run"
    one(output, *COMMON, *AHEAD)
    return output


@pytest.mark.slow
@pytest.mark.parametrize("strategy, way", [("ddp", "group"), ("fsdp2", "group"), ("fsdp2", "folder")])
def test_two_ranks_on_one_server_train_like_one_in_its_own_process(server, alone, tmp_path: Path, strategy, way):
    more = (f"rollout.server.transfer={way}",)
    server.ways()
    two(tmp_path / "two", *served(server, *more), f"trainer.strategy={strategy}")
    # at the start, where the run begins, and after every step
    assert server.ways() == [way] * (2 + STEPS)
    assert_same_run(tmp_path / "two", alone)
    assert_sampled_with_the_policy(tmp_path / "two")
    retries = [line["rollout/server_retries"] for line in runs.metrics(tmp_path / "two") if "reward" in line]
    assert retries == [0.0] * STEPS, "no rank asked before the server had its weights"


def test_two_ranks_that_sample_ahead_on_one_server_train_like_one_that_does(server, tmp_path: Path):
    two(tmp_path / "two", *served(server, *AHEAD), "trainer.strategy=ddp")
    one(tmp_path / "one", *served(server, *AHEAD))
    assert_same_run(tmp_path / "two", tmp_path / "one")
    stale = [line["rollout/staleness_max"] for line in runs.metrics(tmp_path / "two") if "reward" in line]
    assert stale == [0, 1, 1]


def test_sharded_weights_that_are_damaged_in_the_folder_are_gathered_and_written_again(server, tmp_path: Path, capfd):
    def body(rank: int) -> None:
        write, written = WeightsFolder.write, []

        def write_damaged(self: WeightsFolder, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Path:
            path = write(self, version, weights)
            written.append(version)
            if written.count(version) == version == 1:
                file = max(path.glob("*.safetensors"))
                content = bytearray(file.read_bytes())
                content[-3] ^= 1
                file.write_bytes(content)
            return path

        WeightsFolder.write = write_damaged
        words = served(server, "rollout.server.transfer=folder", "trainer.strategy=fsdp2")
        parts = build_run(runs.small(tmp_path / "run", *words), BACKEND, rank, 2)
        try:
            train(parts)
        finally:
            parts.close()
            parts.strategy.close()
        assert written.count(1) == (0 if rank else 2)

    assert ranks.forked(2, body) == [0, 0]
    assert capfd.readouterr().err.count("written again: weights 1 cannot be sent") == 1
    assert_sampled_with_the_policy(tmp_path / "run")


def test_two_ranks_on_two_servers_of_which_one_dies_train_like_one_rank_on_one_server(server, tmp_path: Path):
    many = ("trainer.prompts_per_step=16", "trainer.prompts_per_update=8")
    with model_server.served(MODEL, DIE_AT="24") as second:  # in the second step
        urls = f"rollout.server.url=[{second.url},{server.url}]"
        two(tmp_path / "two", *served(server, *many), urls, "trainer.strategy=ddp")
    one(tmp_path / "one", *served(server, *many))
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert_sampled_with_the_policy(tmp_path / "two")
    alive = [line["rollout/servers_alive"] for line in runs.metrics(tmp_path / "two") if "reward" in line]
    assert alive == sorted(alive, reverse=True)
    assert (alive[0], alive[-1]) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_that_sample_ahead_by_themselves_train_like_one_that_does(ahead_alone, tmp_path: Path, strategy: str):
    two(tmp_path / "two", *COMMON, *AHEAD, f"trainer.strategy={strategy}")
    assert_same_run(tmp_path / "two", ahead_alone)
    stale = [line["rollout/staleness_max"] for line in runs.metrics(tmp_path / "two") if "reward" in line]
    assert stale == [0, 1, 1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_rank_whose_sampler_keeps_older_weights_ends_all_ranks_with_the_reason(tmp_path: Path, strategy: str):
    def body(rank: int) -> None:
        copy, called = local_engine.copy_weights, []

        def forgetful(weights: Iterator[tuple[str, torch.Tensor]], model: torch.nn.Module) -> None:
            copy(iter([*weights][: 0 if rank and called else None]), model)
            called.append(model)

        local_engine.copy_weights = forgetful
        words = (*COMMON, *AHEAD, f"trainer.strategy={strategy}", "rollout.probe_every=1")
        parts = build_run(runs.small(tmp_path / "run", *words), BACKEND, rank, 2)
        try:
            with pytest.raises(RunError, match="does not sample with the policy's weights of version 1"):
                train(parts)
        finally:
            parts.close()
            parts.strategy.close()

    assert ranks.forked(2, body) == [0, 0]
