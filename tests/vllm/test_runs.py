"""Runs of the tiny recipe with responses by vLLM: they learn as with the local engine, over a dead server too."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hwgrpo.support.jsonlines import read_lines
from tests.support.numbers.rounding import GENTLE
from tests.support.processes.launch import forked
from tests.vllm import vllm_environment

pytestmark = pytest.mark.slow

STEPS = 4
RUN = (
    "-m",
    "hwgrpo",
    "train",
    "tiny_sort",
    "model.path=builtin://tiny?task=sort&head=32",
    f"trainer.max_steps={STEPS}",
    "optim.schedule=constant",
    "trainer.validation_n=0",
    "data.validation_max_rows=64",
    "observe.progress=none",
    "rollout.engine_kwargs={block_size: 32}",
    "rollout.kv_cache_gb=0.5",
    *GENTLE,  # which learns fast, too
)
SERVER = (
    "rollout.engine=vllm_server",
    vllm_environment.EXECUTOR,
    f"rollout.server.env={json.dumps(vllm_environment.ONE_PROCESS | vllm_environment.NOT_COMPILED)}",
)


def steps(folder: Path) -> list[dict]:
    """Return the lines of the steps that a run, which may be writing the next one, has logged."""
    return [line for line in read_lines(folder / "metrics.jsonl") if "critic/rewards/mean" in line]


def sampled_reward(line: dict) -> float:
    """Return the mean reward of all responses of a step, also of those that were filtered out."""
    return line.get("filter_groups/reward", line["critic/rewards/mean"])


def assert_learned_on_its_own_weights(found: list[dict]) -> None:
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for line in found:
        # the trainer's log-probs of what vLLM sampled are vLLM's own
        assert abs(line["rollout_corr/kl"]) < 1e-5
        assert line["rollout_corr/rollout_is_eff_sample_size"] > 0.999
    rewards = [sampled_reward(line) for line in found]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.15


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    words = [word for word in RUN if not word.startswith(("rollout.engine_kwargs", "rollout.kv_cache"))]
    done = forked(0, *words, f"trainer.output_dir={folder}")
    assert done.returncode == 0, done.stderr[-4000:]
    return steps(folder)


def assert_like(found: list[dict], local: list[dict]) -> None:
    """Compare what two ways of drawing the same distribution share: 512 samples a step, so 0.02 of noise."""
    for mine, theirs in zip(found[:2], local[:2], strict=True):
        assert abs(sampled_reward(mine) - sampled_reward(theirs)) < 0.12


@pytest.fixture
def left_by_a_killed_run():
    """Shared memory with vLLM's name for the ranks 0 and 1, which it neither removes nor takes over."""
    files = [Path(f"/dev/shm/-tp:0-[0-1]-cpushm_{rank}") for rank in (0, 1)]
    for file in files:
        file.touch()
    before = {*Path("/dev/shm").glob("*-cpushm*")}
    yield
    assert {*Path("/dev/shm").glob("*-cpushm*")} == before
    for file in files:
        file.unlink()


@pytest.mark.usefixtures("left_by_a_killed_run")
@pytest.mark.parametrize("shared_by", [1, 2], ids=["an engine each", "one engine, tensor parallel"])
def test_two_ranks_with_vllm_in_their_own_process_learn_as_with_the_local_engine(local, tmp_path: Path, shared_by):
    """With one engine also with filtered groups, in rounds in which a rank may have no prompt."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    parallel = f"rollout.tensor_parallel_size={shared_by}"
    words = ["rollout.engine=vllm", parallel, "trainer.strategy=fsdp2", f"trainer.output_dir={tmp_path}"]
    words += ["algorithm.filter_groups.enable=true"] * (shared_by == 2)
    done = vllm_environment.run_there(*launcher, *RUN, *words, variables=vllm_environment.NOT_COMPILED)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = steps(tmp_path)
    assert_learned_on_its_own_weights(found)
    assert_like(found, local)
    assert (tmp_path / "final").exists()


def servers_of(parent: int) -> list[int]:
    """Return the processes that `parent` started as rollout servers."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(words[1]) == parent and b"api_server" in command:
            found.append(int(status.parent.name))
    return found


def wait_for(condition, seconds: float, process: subprocess.Popen) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_run_goes_on_when_its_server_is_killed(local, tmp_path: Path):
    before = set(Path("/dev/shm").glob("hwgrpo-weights-*"))
    words = [*RUN, *SERVER, f"trainer.output_dir={tmp_path}"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [vllm_environment.vllm_python(), *words],
            cwd=vllm_environment.ROOT,
            env=vllm_environment.environment(**vllm_environment.NOT_COMPILED),
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for(lambda: len(steps(tmp_path)) >= 2, 900, process)
            (server,) = servers_of(process.pid)
            os.killpg(server, signal.SIGKILL)
            assert process.wait(900) == 0, (tmp_path / "said").read_text()[-4000:]
        finally:
            process.kill()
            process.wait()
    found = steps(tmp_path)
    assert_learned_on_its_own_weights(found)
    assert_like(found, local)
    assert found[-1]["rollout/server_restarts"] == 1
    assert "Bearer" not in (tmp_path / "rollout-server.log").read_text()
    assert set(Path("/dev/shm").glob("hwgrpo-weights-*")) <= before, "weights on their way are removed"
    assert not Path(f"/proc/{server}").exists()


def test_the_turns_of_an_agent_are_sampled_by_a_server_from_the_tokens_that_are_trained(tmp_path: Path):
    words = [word for word in RUN[3:] if not word.startswith(("model.path", "tiny_sort", "trainer.max_steps"))]
    done = forked(
        0,
        *(*RUN[:3], "tiny_guess", "model.path=builtin://tiny?task=guess&head=32&steps=50", "trainer.max_steps=2"),
        *(*words, *SERVER, f"rollout.server.python={vllm_environment.vllm_python()}"),
        *("trainer.validate_at_start=false", f"trainer.output_dir={tmp_path}"),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for line in steps(tmp_path):
        assert line["agent/turns/mean"] > 1.5
        assert line["rollout_corr/log_ratio_max"] < 1e-4  # of sums of 64 products in fp32: 1e-6
