"""Runs killed at random points, in all their threads, and started again: the same numbers to the last bit."""

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hwgrpo.training.checkpoint import checkpoint_files, saver
from tests.resume.kill_points import OF_AGENTS, PLACES, count_lines, kill_after, kill_at
from tests.resume.test_ranks import FILTERED
from tests.support.processes import ranks
from tests.support.runs import runs

pytestmark = pytest.mark.slow

POINTS, PROCESSES = 20, 2
POINTS_OF_AGENTS = 4
RANKS_POINTS, RANKS_PROCESSES = 5, 3
"""Of two ranks: the one that is left waits for the other's reason most of the time, which costs no core."""
WORDS = (
    "trainer.max_steps=4",
    "trainer.save_every=1",
    "trainer.validate_every=2",
    "trainer.validate_at_start=false",
    "trainer.prompts_per_update=2",
    "model.lora.rank=2",
    "model.quantize=nf4",
    "model.lora.dropout=0.1",
    "data.validation_max_rows=4",
)
ONLINE = (
    "reward.functions=[{name: online_reward_model, "
    "kwargs: {verifier: exact_match, warmup_steps: 1, every: 2, lr: 0.01}}]",
)
EPISODES = (
    "model.path=builtin://tiny?task=guess&hidden=32&layers=1&steps=20&batch=32",
    "data.train=task://guess",
    "data.max_prompt_tokens=32",
    "rollout.workflow=environment",
    "rollout.agent.environments=[guessing_game]",
    "rollout.agent.max_turn_tokens=4",
    "rollout.max_response_tokens=96",
    "reward.functions=[environment]",
    "algorithm.advantage.name=gigpo",
    "trainer.max_steps=3",
    "observe.completions_per_step=64",
)
Kill = tuple[str, float]
"""A place and the number of a line there, or "time" and seconds."""


def slow_disk() -> None:
    """Let each file of a checkpoint be there by half for a while."""
    plain = checkpoint_files.write_tensors

    def slow(path: Path, tensors):
        plain(path, tensors)
        os.truncate(path, path.stat().st_size // 2)
        time.sleep(0.02)
        return plain(path, tensors)

    checkpoint_files.write_tensors = slow


def arm(kill: Kill | None) -> None:
    if kill is not None:
        place, number = kill
        kill_after(number) if place == "time" else kill_at(place, int(number))


def train(output: Path, kill: Kill | None, *words: str) -> None:
    slow_disk()
    arm(kill)
    runs.run(output, *WORDS, *words)


def measured(output: Path, *words: str) -> dict[str, float]:
    """Run to the end; return how many lines each place has, and how many seconds the run takes."""

    def counting() -> None:
        counts: Counter[str] = Counter()
        slow_disk()
        count_lines(counts)
        runs.run(output, *WORDS, *words)
        (output.parent / "counts.json").write_text(json.dumps(counts))

    assert runs.forked(counting) == 0
    began = time.monotonic()
    assert runs.forked(lambda: train(output.with_name("timed"), None, *words)) == 0
    return json.loads((output.parent / "counts.json").read_text()) | {"time": time.monotonic() - began}


def drawn(
    generator: random.Random,
    limits: dict[str, float],
    point: int,
    points: int,
    places: Sequence[str] = ("time", *PLACES),
) -> Kill:
    """Draw a kill: places take turns from point to point, and those of one place are in equal parts of the run."""
    turn, chosen = divmod(point, len(places))
    place = places[chosen]
    share = (turn + generator.random()) / (points // len(places))
    return place, share * limits[place] if place == "time" else 1 + int(share * limits[place])


def killed_and_resumed(output: Path, kills: list[Kill], *words: str) -> int:
    """Run to the end, killed on the way; return how many of the kills met a run that was not done."""
    met = 0
    for kill in kills:
        status = runs.forked(lambda kill=kill: train(output, kill, *words))
        assert status in (0, -signal.SIGKILL), status
        met += status != 0
    assert runs.forked(lambda: train(output, None, *words)) == 0
    return met


def side_by_side(processes: int, points: int, body: Callable[[int], Any], folder: Path) -> list[Any]:
    """Return `body(point)`, which JSON can hold, of each point; `processes` take turns with the points."""

    def share(first: int) -> None:
        for point in range(first, points, processes):
            (folder / f"result-{point}.json").write_text(json.dumps(body(point)))

    children = [_child(lambda first=first: share(first)) for first in range(processes)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert statuses == [0] * processes, "see above for what failed"
    return [json.loads((folder / f"result-{point}.json").read_text()) for point in range(points)]


def _child(body: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        os._exit(runs.forked(body) != 0)
    return child


def test_killed_at_random_points_every_run_ends_as_the_uninterrupted_one(tmp_path: Path):
    limits = measured(tmp_path / "whole")
    expected = runs.everything(tmp_path / "whole")
    assert runs.everything(tmp_path / "timed") == expected
    assert min(limits.values()) > 0, limits

    def killed(point: int) -> tuple[str | None, int]:
        """Return what was wrong at a point, and how many of its kills met a run that was not done."""
        generator = random.Random(point)
        kills = [drawn(generator, limits, point, POINTS)]
        if generator.random() < 0.25:  # the run that goes on is killed, too
            kills.append(drawn(generator, limits, generator.randrange(POINTS), POINTS))
        output = tmp_path / f"point-{point}"
        try:
            met = killed_and_resumed(output, kills)
        except AssertionError as error:
            return f"point {point}, {kills}: {error}", 0
        left = [p.name for p in output.rglob("*") if ".partial" in p.name or p.name.endswith(".tmp")]
        kept = sorted(p.name for p in (output / "checkpoints").iterdir())
        found = runs.everything(output)
        differs = [key for key in expected if found[key] != expected[key]]
        if differs or left or kept != ["step-00000003", "step-00000004"]:
            return f"point {point}, {kills}: differs in {differs}, left {left}, kept {kept}", met
        return None, met

    outcomes = side_by_side(PROCESSES, POINTS, killed, tmp_path)
    assert [wrong for wrong, _ in outcomes if wrong] == []
    assert sum(met for _, met in outcomes) >= 0.8 * POINTS, "too many runs were over before they were killed"


@pytest.mark.parametrize(
    ("words", "stale"),
    [
        (("rollout.max_staleness=1", "algorithm.old_logprobs=interpolated", *ONLINE), "rollout/staleness_max"),
        ((*FILTERED, "trainer.max_steps=5"), "filter_groups/staleness_max"),
    ],
    ids=["prefetched", "filtered"],
)
def test_a_run_with_responses_of_earlier_steps_is_killed_at_random_points_and_ends_as_the_uninterrupted_one(
    words: tuple[str, ...], stale: str, tmp_path: Path
):
    words = (*words, "algorithm.correction.name=token_truncate")
    limits = measured(tmp_path / "whole", *words)
    expected = runs.everything(tmp_path / "whole")
    assert any(line.get(stale) == 1 for line in expected["metrics"])
    met = 0
    points = 5
    for point in range(points):
        kill = drawn(random.Random(1000 + point), limits, point, points)
        met += killed_and_resumed(tmp_path / f"point-{point}", [kill], *words)
        assert runs.everything(tmp_path / f"point-{point}") == expected, (point, kill)
    assert met >= 4, "too many runs were over before they were killed"


@pytest.mark.parametrize(
    "words",
    [(), ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate")],
    ids=["on demand", "prefetched"],
)
def test_a_run_that_is_killed_within_trajectories_ends_as_the_uninterrupted_one(words: tuple[str, ...], tmp_path: Path):
    words = (*EPISODES, *words)
    limits = measured(tmp_path / "whole", *words)
    expected = runs.everything(tmp_path / "whole")
    turns = [len(each["outcome"]["turn_rewards"]) for each in expected["completions"]]
    assert max(turns) >= 3
    met = 0
    for point in range(POINTS_OF_AGENTS):
        places = [*OF_AGENTS, "anywhere"]
        kill = drawn(random.Random(2000 + point), limits, point, POINTS_OF_AGENTS, places)
        met += killed_and_resumed(tmp_path / f"point-{point}", [kill], *words)
        assert runs.everything(tmp_path / f"point-{point}") == expected, (point, kill)
    print(f"{met} of {POINTS_OF_AGENTS} kills met a run that was not done")
    assert met >= 0.75 * POINTS_OF_AGENTS, "too many runs were over before they were killed"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_one_of_two_ranks_killed_at_random_points_changes_nothing(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
):
    """Under ddp with filtered groups, which ranks exchange, and under both with a reward model that is trained."""
    monkeypatch.setattr(saver, "GRACE_S", 0.5)  # what the rank that is left waits for one that is dead
    # a rank that died before the process group was made is waited for so many seconds
    words = (f"trainer.strategy={strategy}", "trainer.validate_every=0", "trainer.process_group_timeout=15", *ONLINE)
    if strategy == "ddp":
        words += FILTERED
    if strategy == "fsdp2":  # which takes no quantized base
        words += ("model.quantize=none", "trainer.fsdp2.sync_every=update", "trainer.tokens_per_micro_batch=64")

    def counting(rank: int) -> None:
        counts: Counter[str] = Counter()
        slow_disk()
        if rank == 1:
            count_lines(counts)
        runs.run(tmp_path / "whole", *WORDS, *words)
        if rank == 1:
            (tmp_path / "counts.json").write_text(json.dumps(counts))

    assert ranks.forked(2, counting) == [0, 0]
    limits = json.loads((tmp_path / "counts.json").read_text())
    began = time.monotonic()
    assert ranks.forked(2, lambda rank: train(tmp_path / "timed", None, *words)) == [0, 0]
    limits["time"] = time.monotonic() - began
    expected = runs.everything(tmp_path / "whole")
    every = {key: limits.get(key, 1) for key in ("time", *PLACES)}

    def killed(point: int) -> None:
        kill, victim = drawn(random.Random(point), every, point, RANKS_POINTS), point % 2
        output = tmp_path / f"point-{point}"
        statuses = ranks.forked(2, lambda rank: train(output, kill if rank == victim else None, *words))
        if statuses != [0, 0]:
            assert statuses[victim] == -signal.SIGKILL, (kill, statuses)
            assert statuses[1 - victim] in (0, 70), f"{kill}: the rank that was left did not end by itself"
        assert ranks.forked(2, lambda rank: train(output, None, *words)) == [0, 0], kill
        assert runs.everything(output) == expected, (kill, victim)

    side_by_side(RANKS_PROCESSES, RANKS_POINTS, killed, tmp_path)
