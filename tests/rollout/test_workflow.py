"""Workflows: turns of sampled and observed tokens, in rounds that do not depend on how fast a workflow is."""

import asyncio
import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.rollout.engine import TurnRequest
from hwgrpo.rollout.workflow import Sampler, Trajectory, single_turn
from hwgrpo.rollout.workflow_engine import WorkflowEngine
from hwgrpo.training.loop import train
from hwgrpo.training.setup import build_run
from hwgrpo.values import Completions, Prompt, PromptBatch, Sampling
from tests.support.runs import runs

SAMPLING = Sampling(n=2, max_response_tokens=8)


class Engine:
    """Responds with as many tokens as the last one of the input says, and records its batches."""

    notes: tuple[str, ...] = ()

    def __init__(self, extras: bool = False, dropped: str | None = None) -> None:
        self.metrics = {"perf/rollout_tokens_per_second": 1.0}
        self.batches: list[tuple[list[str], Sampling]] = []
        self.inputs: list[tuple[int, ...]] = []
        self.extras, self.dropped = extras, dropped
        self.version = 3

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        self.batches.append(([prompt.uid for prompt in batch.prompts], sampling))
        self.inputs += [prompt.token_ids for prompt in batch.prompts]
        late = {i: "too late" for i, prompt in enumerate(batch.prompts) if prompt.uid == self.dropped}
        prompts = [i for i in range(len(batch)) if i not in late for _ in range(sampling.n)]
        counts = [min(sampling.max_response_tokens, batch.prompts[i].token_ids[-1]) for i in prompts]
        tokens = torch.cat([torch.arange(10, 10 + count) for count in counts]) if counts else torch.zeros(0).long()
        return Completions(
            prompt_index=torch.tensor(prompts, dtype=torch.int64),
            tokens=tokens,
            offsets=torch.tensor([0, *counts]).cumsum(0),
            logprobs=-tokens.float() / 10,
            finished=torch.tensor([batch.prompts[i].token_ids[-1] == count for i, count in zip(prompts, counts)]),
            texts=tuple("s" * count for count in counts),
            weight_version=self.version,
            floors=-tokens.float(),
            token_extras={"experts": torch.stack([tokens, tokens], 1)} if self.extras else {},
            late=len(late) if sampling.group_timeout else None,
            dropped=late,
        )

    def update_weights(self, version: int) -> None:
        self.version = version


class FakeSession:
    """Ends the request that came first at each `advance`, and records what it is asked for."""

    def __init__(self, engine: Engine, group_timeout: float | None) -> None:
        self.engine, self.group_timeout = engine, group_timeout
        self.submitted: list[TurnRequest] = []
        self.queue: list[int] = []
        self.ended: dict[int, Completions] = {}
        self.released: list[tuple[int, int]] = []
        self.cancelled: list[int] = []
        self.most_queued, self.closed = 0, False

    @property
    def busy(self) -> bool:
        return bool(self.queue)

    def submit(self, requests: list[TurnRequest]) -> list[int]:
        numbers = [*range(len(self.submitted), len(self.submitted) + len(requests))]
        self.submitted += requests
        self.queue += numbers
        self.most_queued = max(self.most_queued, len(self.queue))
        return numbers

    def advance(self) -> list[int]:
        number, *self.queue = self.queue
        request = self.submitted[number]
        sampling = replace(request.sampling, group_timeout=self.group_timeout)
        self.ended[number] = self.engine.generate(PromptBatch((request.prompt,)), sampling)
        return [number]

    def take(self, numbers: list[int]) -> Completions:
        parts = [self.ended.pop(number) for number in numbers]
        dropped = {i: part.dropped[0] for i, part in enumerate(parts) if part.dropped}
        done = Completions.concat(parts, prompts=[1] * len(parts))
        return replace(done, dropped=dropped, weight_version=parts[0].weight_version)

    def release(self, responses: list[tuple[int, int]]) -> None:
        self.released += responses

    def cancel(self, numbers: list[int]) -> None:
        self.cancelled += numbers
        self.queue = [number for number in self.queue if number not in numbers]

    def close(self) -> None:
        self.closed = True


class SessionEngine:
    """Has sessions, in which another engine samples."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.sessions, self.opened = engine, [], []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        raise AssertionError("workflows sample in a session")

    def open_session(self, longest: int, *, room: int, group_timeout: float | None) -> FakeSession:
        self.opened.append((longest, room))
        self.sessions.append(FakeSession(self.engine, group_timeout))
        return self.sessions[-1]


MODES = pytest.mark.parametrize("mode", ["generate", "session", "asynchronous"])
"""How the tokens of workflows are sampled: in rounds, without a session or in one; or as soon as they are asked for."""


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def batch_of(*last: int) -> PromptBatch:
    return PromptBatch(tuple(Prompt(f"0:{i}", "", (7, each), i, {}) for i, each in enumerate(last)))


def engine_of(workflow, engine: Any = None, timeout: float = 20.0, mode: str = "generate") -> WorkflowEngine:
    engine = engine or Engine()
    sampling: Any = engine if mode == "generate" else SessionEngine(engine)
    asynchronous = mode == "asynchronous"
    return WorkflowEngine(sampling, workflow, "w.py:run", Tokenizer(), timeout, asynchronous=asynchronous)


def session_of(engine: WorkflowEngine) -> FakeSession:
    (session,) = engine.sessions
    assert session.closed
    return session


async def two_turns(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
    async def one(sampler: Sampler) -> Trajectory:
        trajectory = sampler.trajectory()
        segment = await sampler.sample(trajectory, max_tokens=3)
        if segment.finished:
            trajectory.observe([90, 2], "<tool>")
            await sampler.sample(trajectory)
        return trajectory

    return await sampler.gather(one)


def test_single_turns_are_what_the_engine_itself_gives(tmp_path):
    run = build_run(runs.small(tmp_path / "run", "rollout.top_k=5"), BACKEND, 0, 1)
    prompts, wrapped = run.prompts.next(), WorkflowEngine(run.engine, single_turn, "single_turn", None, 60.0)
    for sampling in (run.sampling, Sampling(n=1, max_response_tokens=4, greedy=True)):
        plain, through = run.engine.generate(prompts, sampling), wrapped.generate(prompts, sampling)
        for name in ("prompt_index", "tokens", "offsets", "logprobs", "finished", "floors"):
            ours, theirs = getattr(through, name), getattr(plain, name)
            assert (theirs is None and ours is None) or torch.equal(ours, theirs), name
        assert plain.texts == through.texts
        assert (plain.weight_version, plain.late, plain.dropped) == (through.weight_version, through.late, {})
        assert through.loss_mask is None
    run.close()


@MODES
def test_observed_tokens_are_read_and_carry_no_loss(mode):
    engine = Engine(extras=True)
    done = engine_of(two_turns, engine, mode=mode).generate(batch_of(2, 3), SAMPLING)
    assert done.prompt_index.tolist() == [0, 0, 1, 1]
    first, third = done.token_lists()[0], done.token_lists()[2]
    assert first == [10, 11, 90, 2, 10, 11]
    assert third == [10, 11, 12, 90, 2, 10, 11]
    assert done.texts == ("ss<tool>ss",) * 2 + ("sss<tool>ss",) * 2
    assert done.loss_mask is not None
    assert done.loss_mask[:6].tolist() == [True, True, False, False, True, True]
    assert done.logprobs[:6].tolist() == pytest.approx([-1.0, -1.1, 0.0, 0.0, -1.0, -1.1])
    assert done.floors is not None
    assert done.floors[:6].tolist() == [-10, -11, -torch.inf, -torch.inf, -10, -11]
    assert done.token_extras["experts"][:6, 1].tolist() == [10, 11, 0, 0, 10, 11]
    assert done.finished.tolist() == [True] * 4
    assert (done.weight_version, done.versions) == (3, None)
    assert engine.inputs[4] == (7, 2, 10, 11, 90, 2), "all tokens so far, as they are"


def test_each_round_is_one_batch_and_every_request_has_random_numbers_of_its_own():
    engine = Engine()
    done = engine_of(two_turns, engine)
    done.generate(batch_of(2, 3, 1), SAMPLING)
    assert [len(uids) for uids, _ in engine.batches] == [6, 2, 2, 2], "one per number of tokens left"
    assert engine.batches[0][0] == [f"0:{i}/{strand}.0" for i in range(3) for strand in range(2)]
    assert {s.max_response_tokens for _, s in engine.batches} == {3, 4, 5}
    uids = [uid for batch, _ in engine.batches for uid in batch]
    assert len(uids) == len(set(uids))
    assert done.metrics["rollout/turns/mean"] == 2
    assert done.version == 3, "everything else is the engine's"


class EachEngine(Engine):
    """Takes settings for each prompt, and records the prompts of each call."""

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        return super().generate(batch, sampling)

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[list[str]] = []

    def generate_each(self, batch: PromptBatch, samplings: list[Sampling]) -> Completions:
        self.rounds.append([prompt.uid for prompt in batch.prompts])
        parts = [
            self.generate(PromptBatch((prompt,)), sampling)
            for prompt, sampling in zip(batch.prompts, samplings, strict=True)
        ]
        return Completions.concat(parts, prompts=[1] * len(parts))


def test_an_engine_with_settings_for_each_prompt_gets_a_round_at_once():
    alike, each = Engine(), EachEngine()
    expected = engine_of(two_turns, alike).generate(batch_of(2, 3, 1), SAMPLING)
    done = engine_of(two_turns, each).generate(batch_of(2, 3, 1), SAMPLING)
    assert [len(uids) for uids in each.rounds] == [6, 6]
    assert {s.max_response_tokens for _, s in each.batches[6:]} == {3, 4, 5}, "the tokens that are left"
    assert done.token_lists() == expected.token_lists()
    assert done.prompt_index.tolist() == expected.prompt_index.tolist()
    torch.testing.assert_close(done.logprobs, expected.logprobs, rtol=0, atol=0)


def test_an_engine_around_another_one_keeps_its_own_way_to_generate():
    class Around:
        def __init__(self, engine: EachEngine) -> None:
            self.engine, self.calls = engine, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

        def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
            self.calls += 1
            return self.engine.generate(batch, sampling)

    class Extended(EachEngine):
        calls = 0

        def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
            self.calls += 1
            return super().generate(batch, sampling)

    around, extended = Around(EachEngine()), Extended()
    for engine in (around, extended):
        engine_of(two_turns, engine).generate(batch_of(2, 3, 1), SAMPLING)
    assert (around.calls, around.engine.rounds) == (extended.calls, extended.rounds) == (4, [])


def turns_of(session: FakeSession) -> dict[str, tuple[str, int] | None]:
    """Return the request, by uid, that each request continues."""
    uids = [each.prompt.uid for each in session.submitted]
    return {
        uid: None if each.continues is None else (uids[each.continues[0]], each.continues[1])
        for uid, each in zip(uids, session.submitted, strict=True)
    }


@pytest.mark.parametrize("mode", ["session", "asynchronous"])
def test_a_turn_continues_the_last_one_of_its_trajectory(mode):
    async def three_turns(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        first, second = await sampler.responses()
        first.observe([90, 2], "t")
        second.observe([91, 1], "t")
        await sampler.sample(second, max_tokens=1)
        await sampler.sample(first, max_tokens=1)
        if prompt.uid == "0:1":
            first.observe([92, 1], "t")
            await sampler.sample(first)
        return [first, second]

    engine = engine_of(three_turns, mode=mode)
    engine.generate(batch_of(2, 2), SAMPLING)
    session = session_of(engine)
    assert turns_of(session) == {
        "0:0": None,
        "0:0.1": ("0:0", 1),
        "0:0.2": ("0:0", 0),
        "0:1": None,
        "0:1.1": ("0:1", 1),
        "0:1.2": ("0:1", 0),
        "0:1.3": ("0:1.2", 0),
    }
    assert all(each.kept for each in session.submitted)
    assert engine.opened == [(2 + 8, 8)]


@pytest.mark.parametrize("mode", ["session", "asynchronous"])
def test_nothing_is_kept_of_trajectories_that_do_not_go_on(mode):
    seen: dict[str, set[tuple[int, int]]] = {}

    async def strands(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        async def one(sampler: Sampler) -> Trajectory:
            trajectory = sampler.trajectory()
            await sampler.sample(trajectory, max_tokens=1)
            return trajectory

        done = await sampler.gather(one)
        trajectory = sampler.trajectory()
        await sampler.sample(trajectory)
        while not trajectory.truncated:
            trajectory.observe([90, 2], "t")
            await sampler.sample(trajectory)
        own = sampler.trajectory()
        await sampler.sample(own, max_tokens=1)
        seen["released before the end"] = {*engine.sessions[0].released}
        return done

    engine = engine_of(strands, mode=mode)
    engine.generate(batch_of(2), SAMPLING)
    session = session_of(engine)
    uids = [each.prompt.uid for each in session.submitted]
    assert uids[:2] == ["0:0/0.0", "0:0/1.0"]
    assert {(0, 0), (1, 0)} <= seen["released before the end"], "those of strands that are over"
    last = len(uids) - 1
    assert (last - 1, 0) in seen["released before the end"], "that of a trajectory without tokens left"
    assert (last, 0) not in seen["released before the end"]


def test_a_slow_tool_keeps_nobody_waiting_where_workflows_are_asynchronous():
    ended: list[str] = []
    others_are_over = asyncio.Event()

    async def waiting(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        async def one(sampler: Sampler) -> Trajectory:
            trajectory = sampler.trajectory()
            for turn in range(3):
                await sampler.sample(trajectory, max_tokens=1)
                if prompt.uid == "0:0" and turn == 0:
                    await others_are_over.wait()  # in rounds this would never come
                trajectory.observe([1], "t")
            return trajectory

        done = await sampler.gather(one)
        ended.append(prompt.uid)
        if len(ended) == 2:
            others_are_over.set()
        return done

    engine = engine_of(waiting, mode="asynchronous")
    done = engine.generate(batch_of(1, 1, 1), SAMPLING)
    assert ended == ["0:1", "0:2", "0:0"]
    assert done.prompt_index.tolist() == [0, 0, 1, 1, 2, 2]
    rounds = engine_of(waiting, mode="session", timeout=0.2)
    ended.clear()
    others_are_over = asyncio.Event()
    with pytest.raises(RunError, match="neither asked for tokens nor ended"):
        rounds.generate(batch_of(1, 1, 1), SAMPLING)
    assert session_of(rounds).most_queued == 6


def test_a_request_of_a_strand_that_was_cancelled_is_sampled_no_further():
    async def timed_out(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        async def one(sampler: Sampler) -> Trajectory:
            await sampler.sample(sampler.trajectory(), max_tokens=1)
            if prompt.uid == "0:0":
                raise ValueError("a tool")
            trajectory = sampler.trajectory()
            await sampler.sample(trajectory, max_tokens=1)
            return trajectory

        with contextlib.suppress(ValueError):
            return await sampler.gather(one, 9 if prompt.uid == "0:0" else None)
        return await sampler.responses()

    engine = engine_of(timed_out, mode="asynchronous")
    done = engine.generate(batch_of(2, 2), SAMPLING)
    session = session_of(engine)
    cancelled = [session.submitted[number].prompt.uid for number in session.cancelled]
    assert cancelled == [f"0:0/{strand}.0" for strand in range(9 - len(cancelled), 9)] != []
    assert not {*session.cancelled} & {*session.ended}
    assert done.lengths.tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_slow_workflow_changes_neither_batches_nor_order(slow):
    async def waiting(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        async def one(sampler: Sampler) -> Trajectory:
            trajectory = sampler.trajectory()
            await sampler.sample(trajectory, max_tokens=1)
            await asyncio.sleep(0.05 * (prompt.uid == f"0:{slow}"))
            trajectory.observe([90, 2], "t")
            await sampler.sample(trajectory, max_tokens=1)
            return trajectory

        return await sampler.gather(one)

    engine = Engine()
    engine_of(waiting, engine).generate(batch_of(1, 1, 1), SAMPLING)
    assert [len(uids) for uids, _ in engine.batches] == [6, 6]
    assert engine.batches[1][0] == [f"0:{i}/{strand}.1" for i in range(3) for strand in range(2)]


@MODES
def test_a_response_ends_where_no_tokens_are_left(mode):
    seen = []

    async def talkative(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        trajectory = sampler.trajectory()
        while not trajectory.truncated:
            segment = await sampler.sample(trajectory)
            seen.append((segment.finished, len(segment.token_ids)))
            trajectory.observe([90, 2], "t")
        with pytest.raises(RunError, match="truncated trajectory"):
            await sampler.sample(trajectory)
        return [trajectory]

    done = engine_of(talkative, mode=mode).generate(batch_of(2), SAMPLING)
    assert done.lengths.tolist() == [8]
    assert done.finished.tolist() == [False]
    assert seen == [(True, 2), (True, 2), (False, 0)]


@MODES
def test_a_group_whose_tokens_come_too_late_is_dropped_with_its_reason(mode):
    engine = Engine(dropped="0:1/0.0")
    done = engine_of(two_turns, engine, mode=mode).generate(batch_of(2, 2, 2), Sampling(2, 8, group_timeout=5.0))
    assert done.prompt_index.tolist() == [0, 0, 2, 2]
    assert (done.dropped, done.late) == ({1: "too late"}, 1)
    alone = engine_of(single_turn, Engine(dropped="0:0"), mode=mode)
    everything = alone.generate(batch_of(2), Sampling(2, 8, group_timeout=5.0))
    assert (len(everything), everything.dropped) == (0, {0: "too late"})
    assert everything.weight_version == 3, "not older than what the engine has"


async def raising(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
    await sampler.sample(sampler.trajectory())
    raise KeyError("no such tool")


async def at_once(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
    trajectories = [sampler.trajectory(), sampler.trajectory()]
    await asyncio.gather(*map(sampler.sample, trajectories))
    return trajectories


async def nothing(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
    return []


async def too_many(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
    return [*await sampler.responses(), *await sampler.responses()]


async def twice(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
    trajectories = await sampler.responses()
    return [trajectories[0], trajectories[0]]


async def observed_alone(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
    trajectory = sampler.trajectory()
    trajectory.observe([90], "t")
    return [trajectory]


async def no_tokens_wanted(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
    await sampler.sample(sampler.trajectory(), max_tokens=0)
    return []


async def without_tokens(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
    return [sampler.trajectory()]


async def text(prompt: Prompt, sampler: Sampler) -> Any:
    return "42"


@MODES
@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        (raising, "'w.py:run' on the prompt 0:0 failed: KeyError: 'no such tool'"),
        (at_once, "use Sampler.gather, which gives each coroutine a sampler of its own"),
        (nothing, "on the prompt 0:0 returned .*: return a list of 1 to 2 different trajectories"),
        (too_many, "return a list of 1 to 2 different trajectories"),
        (twice, "return a list of 1 to 2 different trajectories"),
        (without_tokens, "each with a sampled segment"),
        (observed_alone, "each with a sampled segment"),
        (no_tokens_wanted, r"sample\(max_tokens=0\): a segment has at least one token"),
        (text, "returned '42': return a list"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_workflow_does_wrong_is_named(workflow, message, mode):
    with pytest.raises(RunError, match=message):
        engine_of(workflow, mode=mode).generate(batch_of(2, 2), SAMPLING)


@MODES
def test_a_workflow_that_neither_asks_nor_ends_is_named_after_the_time_limit(mode):
    async def hanging(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        if prompt.uid == "0:1":
            await asyncio.Event().wait()
        return await sampler.responses()

    hung = "0:1" if mode == "asynchronous" else "0:0, 0:1"
    with pytest.raises(RunError, match=rf"after 0.2 s .* nor ended: {hung}; give what it waits for a time limit"):
        engine_of(hanging, timeout=0.2, mode=mode).generate(batch_of(2, 2), SAMPLING)


@MODES
def test_a_workflow_that_fails_is_named_while_another_waits(mode):
    async def one_waits(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        if prompt.uid == "0:1":
            await asyncio.sleep(15)
        raise ValueError("a bug in a tool")

    with pytest.raises(RunError, match="the prompt 0:0 failed: ValueError: a bug in a tool"):
        engine_of(one_waits, timeout=10, mode=mode).generate(batch_of(2, 2), SAMPLING)


def test_a_workflow_that_is_no_coroutine_is_refused(tmp_path: Path):
    (tmp_path / "tool.py").write_text("def plain(prompt, sampler):\n    return []\n")
    with pytest.raises(ConfigError, match=r"tool.py:plain' is no coroutine; write `async def`"):
        build_run(runs.small(tmp_path / "run", f"rollout.workflow={tmp_path}/tool.py:plain"), BACKEND, 0, 1)


@MODES
def test_a_workflow_that_is_cancelled_in_one_strand_leaves_the_others_going(mode):
    async def careful(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        async def one(sampler: Sampler) -> Trajectory:
            trajectory = sampler.trajectory()
            await sampler.sample(trajectory, max_tokens=1)
            if prompt.uid == "0:0":
                raise ValueError("a tool")
            await sampler.sample(trajectory, max_tokens=1)
            return trajectory

        with contextlib.suppress(ValueError):
            return await sampler.gather(one)
        return await sampler.responses()

    done = engine_of(careful, mode=mode).generate(batch_of(2, 2), SAMPLING)
    assert done.lengths.tolist() == [2, 2, 2, 2]


TOOL = """
async def asked_twice(prompt, sampler):
    async def one(sampler):
        trajectory = sampler.trajectory()
        await sampler.sample(trajectory, max_tokens=2)
        if not trajectory.truncated:
            trajectory.observe(sampler.encode("="), "=")
        if not trajectory.truncated:
            await sampler.sample(trajectory)
        return trajectory

    return await sampler.gather(one)
"""


@pytest.mark.parametrize("ahead", [(), ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate")])
def test_a_run_trains_on_turns_validates_with_them_and_resumes(ahead, tmp_path: Path):
    (tmp_path / "tool.py").write_text(TOOL)
    words = (f"rollout.workflow={tmp_path}/tool.py:asked_twice", *ahead, "observe.completions_per_step=64")
    words = (*words, "trainer.save_every=1", "trainer.validate_every=2")
    runs.run(tmp_path / "whole", *words)
    run = build_run(runs.small(tmp_path / "cut", *words), BACKEND, 0, 1)
    save = run.saver.save

    class Cut(Exception):
        pass

    def cut(step: int, **options: Any) -> None:
        save(step, **options)
        if step == 3:
            run.saver.wait()
            raise Cut

    run.saver.save = cut
    with pytest.raises(Cut):
        train(run)
    run.close()
    runs.run(tmp_path / "cut", *words)
    assert runs.everything(tmp_path / "cut") == runs.everything(tmp_path / "whole")
    texts = [json.loads(line)["response"] for line in (tmp_path / "whole/completions.jsonl").read_text().splitlines()]
    assert sum("=" in text[1:4] for text in texts) > len(texts) / 2
    steps = [line for line in runs.metrics(tmp_path / "whole") if "rollout/turns/mean" in line]
    assert all(1 < line["rollout/turns/mean"] <= 2 for line in steps)
    assert all(abs(line["rollout_corr/kl"]) < 0.05 for line in steps if "rollout_corr/kl" in line)


def test_ranks_that_share_an_engine_have_no_workflow(tmp_path: Path):
    (tmp_path / "tool.py").write_text(TOOL)
    words = (
        f"rollout.workflow={tmp_path}/tool.py:asked_twice",
        "rollout.engine=vllm",
        "rollout.tensor_parallel_size=2",
    )
    with pytest.raises(ConfigError, match=re.escape("rollout.tensor_parallel_size=2: ranks that share an engine")):
        runs.small(tmp_path, *words)


def test_an_engine_without_sessions_is_not_asynchronous(tmp_path: Path):
    (tmp_path / "tool.py").write_text(TOOL)
    words = (f"rollout.workflow={tmp_path}/tool.py:asked_twice", "rollout.engine=vllm")
    remedy = "rollout.agent.asynchronous=true with rollout.engine=vllm: .* use rollout.engine=local, vllm_server or"
    with pytest.raises(ConfigError, match=remedy):
        runs.small(tmp_path, *words, "rollout.agent.asynchronous=true")


def test_a_run_with_asynchronous_workflows_trains(tmp_path: Path):
    (tmp_path / "tool.py").write_text(TOOL)
    words = (f"rollout.workflow={tmp_path}/tool.py:asked_twice", "rollout.agent.asynchronous=true")
    run = build_run(runs.small(tmp_path / "run", *words, "trainer.max_steps=1"), BACKEND, 0, 1)
    engine: Any = run.engine
    assert engine._asynchronous
    train(run)
    run.close()
    steps = [line for line in runs.metrics(tmp_path / "run") if "actor/pg_loss" in line]
    assert [line["rollout/continued_tokens"] > 0 < line["rollout/prefilled_tokens"] for line in steps] == [True]
    assert abs(steps[0]["rollout_corr/kl"]) < 0.05


def test_the_changed_file_of_a_workflow_is_noted_at_a_resume(tmp_path: Path, capsys):
    (tmp_path / "tool.py").write_text(TOOL)
    words = (f"rollout.workflow={tmp_path}/tool.py:asked_twice", "observe.progress=plain")
    runs.run(tmp_path / "run", *words, "trainer.max_steps=1")
    (tmp_path / "tool.py").write_text(TOOL + "# changed")
    runs.run(tmp_path / "run", *words, "trainer.max_steps=2")
    assert "the file of rollout.workflow has changed since the checkpoint" in capsys.readouterr().out


def test_a_sampler_of_a_validation_wants_as_many_responses_as_that():
    sampler = Sampler(batch_of(1).prompts[0], Sampling(n=5, max_response_tokens=4), Tokenizer(), SimpleNamespace())  # type: ignore[arg-type]
    assert (sampler.n, sampler.trajectory().left, sampler.encode("ab")) == (5, 4, [97, 98])
