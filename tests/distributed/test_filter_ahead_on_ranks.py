"""Ranks that choose their groups together do so beside the training, too: the same groups as one process."""

import os
import signal
import time
from pathlib import Path

import pytest
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.errors import RunError
from hwgrpo.rollout.pause_gate import Gate
from hwgrpo.support.jsonlines import read_lines
from hwgrpo.training.loop import iterate_steps, train, train_step, validate_now
from hwgrpo.training.setup import build_run
from tests.support.processes import ranks
from tests.support.runs import runs

AHEAD = ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate", "trainer.max_steps=4")
FILTER = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_rounds=2")
RATED = ("data.difficulty.easy_threshold=0.9", "data.difficulty.hard_threshold=0.1")
LIMIT = "trainer.process_group_timeout=20"
OFTEN = ("trainer.validate_every=1", "trainer.save_every=1", "observe.completions_per_step=64")


def trained(output: Path) -> set[tuple[int, str, str]]:
    """Return the step, prompt and text of rank 0's responses."""
    lines = read_lines(output / "completions.jsonl")
    return {(line["step"], line["uid"], line["response"]) for line in lines if "advantage" in line}


def metrics(output: Path, *names: str) -> list[float]:
    return [line[name] for name in names for line in runs.metrics(output) if "reward" in line]


def interrupted(output: Path, *words: str) -> None:
    """Train, and send one rank a signal after step 2, while the batch of step 4 is sampled."""
    run = build_run(runs.small(output, *words), BACKEND, 0, 1)
    for step in iterate_steps(run, train_step, validate_now):
        if step == 2 and run.strategy.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    assert run.interrupted
    run.close()


@pytest.mark.parametrize("limited", [False, True], ids=["", "bound of 0"])
def test_a_rank_whose_thread_is_late_validates_no_batch_early(limited, tmp_path, monkeypatch):
    """Else one rank's thread would wait for the other's, whose engine is validated with, by both ranks together."""
    inside = Gate.inside

    def body(rank: int) -> None:
        def late(gate: Gate):
            time.sleep(0.5 * rank)
            return inside(gate)

        monkeypatch.setattr(Gate, "inside", late)
        run = build_run(runs.small(tmp_path / "run", *FILTER, *AHEAD, *OFTEN, LIMIT), BACKEND, 0, 1)
        if limited:  # as the guard does
            run.responses.limit_staleness(0, 3)
        assert train(run) == "completed"
        run.close()

    assert ranks.forked(2, body) == [0, 0]


def test_an_engine_that_fails_on_one_rank_ends_both_with_its_error(tmp_path, capfd):
    def body(rank: int) -> None:
        run = build_run(runs.small(tmp_path / "run", *RATED, *AHEAD, LIMIT), BACKEND, 0, 1)
        generate, calls = run.engine.generate, []

        def failing(*arguments):
            calls.append(1)
            if rank and len(calls) == 3:
                raise RunError("the server is gone")
            return generate(*arguments)

        run.engine.generate = failing
        with pytest.raises(RunError, match="the server is gone"):
            train(run)
        run.close()

    assert ranks.forked(2, body) == [0, 0]


@pytest.mark.parametrize("words", [FILTER, RATED], ids=["filtered", "rated"])
def test_ranks_train_the_groups_of_one_process_and_resume_after_a_signal(words, tmp_path):
    words = (*words, *AHEAD, *OFTEN, "trainer.process_group_timeout=60")
    runs.run(tmp_path / "one", *words)
    assert ranks.forked(2, lambda rank: runs.run(tmp_path / "two", *words)) == [0, 0]
    assert ranks.forked(2, lambda rank: interrupted(tmp_path / "cut", *words)) == [0, 0]
    assert ranks.forked(2, lambda rank: runs.run(tmp_path / "cut", *words)) == [0, 0]
    assert set() < trained(tmp_path / "two") < trained(tmp_path / "one"), "rank 0 has a part of each step"
    numbers = "reward", "actor/grad_norm", "rollout/staleness_max"
    assert metrics(tmp_path / "two", *numbers) == pytest.approx(metrics(tmp_path / "one", *numbers), rel=1e-3)
    assert runs.everything(tmp_path / "cut") == runs.everything(tmp_path / "two")
