"""A prompt that a rollout server never answers costs a run its group alone: in turns, ahead, resumed, on two ranks."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.support.jsonlines import read_lines
from hwgrpo.training.finish import finish
from hwgrpo.training.loop import train
from hwgrpo.training.setup import build_run
from tests.support.numbers.rounding import GENTLE
from tests.support.processes import ranks
from tests.support.runs import runs
from tests.support.servers import model_server
from tests.support.servers.fake_server import TOKEN

MODEL = next(word for word in runs.SMALL if word.startswith("model.path=")).removeprefix("model.path=")
TIMEOUT = 2.0
STEPS = 3
COMMON = (
    f"trainer.max_steps={STEPS}",
    "trainer.save_every=1",
    "trainer.validation_n=0",
    "observe.completions_per_step=64",
    *GENTLE,
)
AHEAD = ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate")
REWARD = """
from tests.support.runs.dense_reward import share_right

def picky(data_source, solution_str, ground_truth, extra_info=None, dropped=()):
    if ground_truth in dropped:
        raise ValueError("one of those")
    return share_right(data_source, solution_str, ground_truth)
"""
WITHOUT = ("rollout/", "response_length", "perf/", "prompt_length", "reward_failures", "rewards/")
"""Metrics of all responses, those without a reward included, and counts of requests and of late groups."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWGRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HWGRPO_SERVER_TOKEN", TOKEN)
        with model_server.served(MODEL) as address:
            yield address


@pytest.fixture(scope="module")
def words(server, tmp_path_factory: pytest.TempPathFactory):
    """Return the settings of a run on the server in which the rewards of some answers are dropped."""
    file = tmp_path_factory.mktemp("rewards") / "rewards.py"
    file.write_text(REWARD)

    def words(*dropped: str) -> tuple[str, ...]:
        given = f"kwargs: {{dropped: {json.dumps(dropped)}}}"
        reward = f"reward.functions=[{{name: '{file}:picky', on_error: drop_group, {given}}}]"
        address = ("rollout.engine=vllm_server", f"rollout.server.url={server.url}")
        return (*COMMON, *address, reward, f"rollout.group_timeout={TIMEOUT}")

    return words


def one(output: Path, *words: str) -> None:
    assert runs.forked(lambda: runs.run(output, *words)) == 0


def two(output: Path, *words: str) -> None:
    def body(rank: int) -> None:
        parts = build_run(runs.small(output, *words), BACKEND, rank, 2)
        try:
            finish(parts, train(parts))
        finally:
            parts.close()
            parts.strategy.close()

    assert ranks.forked(2, body) == [0, 0]


@pytest.fixture(scope="module")
def stuck(server, words, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return a response to a prompt of the second step that no other step has."""
    server.stick()
    one(tmp_path_factory.mktemp("plain") / "run", *words())
    lines = list(read_lines(next(Path(str(tmp_path_factory.getbasetemp())).glob("plain*/run/completions.jsonl"))))
    return next(
        line
        for line in lines
        if {each["step"] for each in lines if each["ground_truth"] == line["ground_truth"]} == {2}
    )


def comparable(lines: list[dict]) -> list[dict]:
    return [{name: value for name, value in line.items() if not name.startswith(WITHOUT)} for line in lines]


def assert_without_the_group(output: Path, stuck: dict, expected: Path) -> None:
    """The run dropped the group and is else one in which the rewards of that group were dropped."""
    found, other = runs.everything(output), runs.everything(expected)
    dropped = [line for line in found["completions"] if "dropped" in line]
    assert [(line["step"], line["uid"]) for line in dropped] == [(2, stuck["uid"])]
    assert dropped[0]["dropped"] == "no responses within rollout.group_timeout=2 s, twice"
    kept = [line for line in other["completions"] if line["reward"] is not None]
    assert [line for line in found["completions"] if "dropped" not in line] == kept
    steps = [line for line in found["metrics"] if "reward" in line]
    assert [line["rollout/groups_dropped"] for line in steps] == [0, 1, 0]
    assert [line["response/aborted_ratio"] for line in steps] == [0, 1 / 4, 0]
    assert steps[-1]["rollout/server_restarts"] == steps[-1]["rollout/server_retries"] == 0
    assert comparable(found["metrics"]) == comparable(other["metrics"])
    assert found["weights"] == other["weights"]


@pytest.fixture(scope="module", params=[(), AHEAD], ids=["in turns", "ahead"])
def ahead(request) -> tuple[str, ...]:
    return request.param


@pytest.fixture(scope="module")
def expected(server, words, stuck, ahead, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in which the rewards of the group are dropped."""
    output = tmp_path_factory.mktemp("expected") / "run"
    server.stick()
    one(output, *words(stuck["ground_truth"]), *ahead)
    return output


def test_the_run_is_the_one_without_that_group(server, words, stuck, tmp_path: Path, ahead, expected: Path):
    server.stick(stuck["prompt"])
    one(tmp_path / "run", *words(), *ahead)
    assert_without_the_group(tmp_path / "run", stuck, expected)


def test_a_run_that_is_killed_meanwhile_resumes_without_that_group(
    server, words, stuck, tmp_path: Path, ahead, expected: Path
):
    server.stick(stuck["prompt"])

    def killed() -> None:
        def kill() -> None:
            runs.wait_for_checkpoint(tmp_path / "run", 1)
            time.sleep(0 if ahead else TIMEOUT)  # ahead, the checkpoint has the second step's responses
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        runs.run(tmp_path / "run", *words(), *ahead)

    assert runs.forked(killed) == -signal.SIGKILL
    assert runs.metrics(tmp_path / "run")[-1]["step"] in ((1, 2) if ahead else (1,)), "it was killed meanwhile"
    one(tmp_path / "run", *words(), *ahead)
    assert_without_the_group(tmp_path / "run", stuck, expected)


@pytest.mark.parametrize("prompts", [4, 2], ids=["others left", "all of a rank's groups"])
def test_two_ranks_stay_in_step_when_one_of_them_drops_a_group(server, words, stuck, tmp_path: Path, prompts: int):
    """Both ranks have the same prompts as one; the group that is dropped is one rank's, and counted for both."""
    more = (f"trainer.prompts_per_step={prompts}",)
    server.stick()
    two(tmp_path / "plain", *words(), *more)
    server.stick(stuck["prompt"])
    two(tmp_path / "run", *words(), *more)
    steps = [line for line in runs.metrics(tmp_path / "run") if "reward" in line]
    assert sum(line["rollout/groups_dropped"] for line in steps) == 1
    at = next(i for i, line in enumerate(steps) if line["rollout/groups_dropped"])
    assert steps[at]["response/aborted_ratio"] == 1 / prompts
    plain = [line for line in runs.metrics(tmp_path / "plain") if "reward" in line]
    assert comparable(steps[:at]) == comparable(plain[:at])
    assert steps[at]["reward"] != plain[at]["reward"]


def test_two_ranks_go_on_when_all_groups_of_a_step_are_dropped(server, words, stuck, tmp_path: Path):
    more = ("trainer.prompts_per_step=2", "trainer.max_steps=1", "trainer.validate_at_start=false")
    server.stick()
    two(tmp_path / "plain", *words(), *more)
    lines = list(read_lines(tmp_path / "plain/completions.jsonl"))
    every = {line["prompt"] for line in lines}
    one(tmp_path / "one", *words(), *more)
    every |= {line["prompt"] for line in read_lines(tmp_path / "one/completions.jsonl")}
    assert len(every) == 2
    server.stick(*every)
    two(tmp_path / "run", *words(), *more)
    (step,) = (line for line in runs.metrics(tmp_path / "run") if "reward" in line)
    assert (step["rollout/groups_dropped"], step["response/aborted_ratio"], step["reward"]) == (2, 1, "NaN")
    records = list(read_lines(tmp_path / "run/completions.jsonl"))
    assert {record["prompt"] for record in records if "dropped" in record} == every, "those of both ranks"
    server.stick()
    answers = {line["ground_truth"] for line in read_lines(tmp_path / "one/completions.jsonl")}
    two(tmp_path / "reward", *words(*sorted(answers)), *more)
    assert runs.everything(tmp_path / "run")["weights"] == runs.everything(tmp_path / "reward")["weights"]
