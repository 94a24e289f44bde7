"""Sessions at servers: requests are sent as they come, and workflows go on while others' requests are in flight."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hwgrpo.catalog import ENGINES
from hwgrpo.errors import RunError
from hwgrpo.rollout.engine import TurnRequest
from hwgrpo.rollout.pause_gate import Gate, Stopped
from hwgrpo.rollout.server import engine as server_engine
from hwgrpo.rollout.server.engine import ServerEngine
from hwgrpo.rollout.workflow import Sampler, Trajectory
from hwgrpo.rollout.workflow_engine import WorkflowEngine
from hwgrpo.values import Completions, Prompt, Sampling
from tests.rollout.served import TOKENIZER, batch, parts_for
from tests.rollout.server.fake_sglang import FakeSglang
from tests.support.runs import runs
from tests.support.servers.fake_server import TOKEN, FakeServer, come_back
from tests.support.servers.model_server import ModelServer

ONE = Sampling(n=1, max_response_tokens=4)


class HoldingServer(FakeServer):
    """Answers a prompt when it is let go, if it is held; its samples are those of `good`.

    Attributes:
        held: text of a prompt -> event that lets it go.
        holding: texts of prompts that are held now.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.held: dict[str, threading.Event] = {}
        self.holding: list[str] = []
        self.most_held = 0
        super().__init__(*arguments, **settings)

    def hold(self, *texts: str) -> None:
        self.held |= {text: threading.Event() for text in texts}

    def answer(self, asked: dict[str, Any]) -> Any:
        tokens = asked["prompt"] if "prompt" in asked else asked["input_ids"][0]
        text = str(TOKENIZER.decode(tokens))
        if text in self.held:
            self.holding.append(text)
            self.most_held = max(self.most_held, len(self.holding))
            self.held[text].wait(30)
            self.holding.remove(text)
        return super().answer(asked)

    def close(self) -> None:
        for event in self.held.values():
            event.set()
        super().close()


class HoldingSglang(HoldingServer, FakeSglang):
    """The same of SGLang's kind."""


KINDS = {"vllm_server": HoldingServer, "sglang_server": HoldingSglang}


@pytest.fixture
def kind() -> str:
    return "vllm_server"


@pytest.fixture
def server(monkeypatch, kind):
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    server = KINDS[kind]()
    yield server
    server.close()


@pytest.fixture
def make(server, tmp_path, kind):
    engines = []

    def make(*overrides: str, gate: Gate | None = None) -> ServerEngine:
        parts = parts_for(server.url, tmp_path, f"rollout.engine={kind}", *overrides)
        engines.append(ENGINES.load(kind).make(replace(parts, gate=gate)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def turns(*texts: str, sampling: Sampling = ONE) -> list[TurnRequest]:
    return [TurnRequest(prompt, sampling) for prompt in batch(*texts).prompts]


def wait_until(done: Any) -> None:
    """Wait for a state of other threads; a test's own time limit ends a wait in vain."""
    while not done():
        threading.Event().wait(0.005)


both_kinds = pytest.mark.parametrize("kind", [*KINDS])


@both_kinds
def test_requests_are_sent_as_they_come_and_taken_as_their_responses_arrive(make, server):
    engine = make()
    engine.update_weights(3)
    server.hold("aa")
    session = engine.open_session()
    assert session.submit(turns("aa", "b", sampling=Sampling(n=2, max_response_tokens=4))) == [0, 1]
    assert session.advance() == [1]
    assert session.submit(turns("c")) == [2]
    assert session.advance() == [2]
    assert session.busy
    server.held["aa"].set()
    assert session.advance() == [0]
    assert not session.busy
    done = session.take([2, 0, 1])
    assert done.prompt_index.tolist() == [0, 1, 1, 2, 2]
    assert done.tokens.tolist() == [5, 5, 6, 7, 5, 6, 7]
    assert (done.weight_version, done.late, done.dropped) == (3, None, {})
    session.close()
    assert engine.metrics["perf/rollout_tokens_per_second"] > 0 == engine.metrics["rollout/server_retries"]


def test_a_request_has_the_seed_that_it_has_without_a_session(make, server):
    engine = make()
    engine.generate(batch("a", "b"), ONE)
    session = engine.open_session()
    for text in ("b", "a"):
        session.submit(turns(text))
    while session.busy:
        session.advance()
    session.close()
    seeds = [{TOKENIZER.decode(each["prompt"]): each["seed"] for each in server.asked[i : i + 2]} for i in (0, 2)]
    assert seeds[0] == seeds[1]
    assert len({*seeds[0].values()}) == 2


def test_as_many_requests_are_in_flight_as_without_a_session(make, server, monkeypatch):
    monkeypatch.setattr(server_engine, "THREADS", 2)
    engine = make()
    server.hold("a", "b", "c", "d")
    session = engine.open_session()
    session.submit(turns("a"))
    session.submit(turns("b", "c", "d"))
    wait_until(lambda: len(server.holding) == 2)
    server.held["b"].set()
    assert session.advance() == [1]
    wait_until(lambda: server.holding == ["a", "c"])
    for event in server.held.values():
        event.set()
    while session.busy:
        session.advance()
    assert server.most_held == 2
    session.close()


def test_a_cancelled_request_is_aborted_alone_and_its_server_keeps_the_others(make, server, monkeypatch):
    monkeypatch.setattr(server_engine, "THREADS", 2)
    engine = make("rollout.server.request_timeout=600")
    server.hold("a", "b")
    session = engine.open_session()
    session.submit(turns("a", "b", "c", "d"))
    wait_until(lambda: len(server.holding) == 2)
    session.cancel([0, 3])  # one in flight, one in the queue
    assert session.advance() == [2], "the thread of the cancelled one takes the next"
    assert session.busy
    server.held["b"].set()
    assert session.advance() == [1]
    assert not session.busy
    assert len(session.take([1, 2])) == 2
    session.close()
    assert engine._servers[0].ready
    assert engine.metrics["rollout/server_retries"] == engine._servers[0].in_flight == 0
    assert "d" not in [TOKENIZER.decode(each["prompt"]) for each in server.asked]


def test_closing_ends_requests_in_flight_and_the_engine_goes_on(make, server):
    engine = make("rollout.server.request_timeout=600")
    server.hold("a")
    session = engine.open_session()
    session.submit(turns("a"))
    wait_until(lambda: server.holding)
    session.close()
    assert len(engine.generate(batch("b"), ONE)) == 1
    assert engine.metrics["rollout/server_retries"] == 0


def test_a_request_that_waits_for_a_server_is_cancelled_too(make, server):
    """Its server has died: nothing is in flight that could be aborted."""
    engine = make("rollout.server.start_timeout=600")
    engine._servers[0].ready = False
    engine._servers[0]._repair_thread = threading.current_thread()
    session = engine.open_session()
    session.submit(turns("a"))
    session.close()
    engine._servers[0]._repair_thread = None


def as_workflow(engine: ServerEngine, workflow: Any, asynchronous: bool = True) -> WorkflowEngine:
    return WorkflowEngine(engine, workflow, "w.py:run", TOKENIZER, 20.0, asynchronous=asynchronous)


def calling(tool: Any) -> Any:
    """Return a workflow of three turns with a tool between them."""

    async def workflow(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        trajectory = sampler.trajectory()
        for turn in range(3):
            await sampler.sample(trajectory, max_tokens=1)
            if turn < 2:
                trajectory.observe(sampler.encode(await tool(prompt.uid, turn)), "t")
        return [trajectory]

    return workflow


LONG = Sampling(n=1, max_response_tokens=16)


@both_kinds
def test_a_slow_tool_and_a_slow_response_keep_nobody_waiting(make, server):
    ended = []
    others = asyncio.Event()

    async def tool(uid: str, turn: int) -> str:
        ended.append((uid, turn))
        if (uid, turn) == ("a", 0):
            await others.wait()  # comes when "b" has had all its turns
        if (uid, turn) == ("b", 1):
            others.set()
        if (uid, turn) == ("a", 1):
            await asyncio.sleep(0.01)  # nothing but the response of "c" is awaited of the server now
            server.held["c"].set()
        return "+"

    server.hold("c")  # its response comes when "a" has had all its turns
    done = as_workflow(make(), calling(tool)).generate(batch("c", "a", "b"), LONG)
    assert [uid for uid, turn in ended if turn == 1] == ["b", "a", "c"]
    assert done.prompt_index.tolist() == [0, 1, 2]
    assert done.lengths.tolist() == [5, 5, 5]
    assert done.loss_mask is not None
    assert done.loss_mask.tolist() == [True, False, True, False, True] * 3


def test_in_rounds_a_session_gives_what_single_batches_give(make, server):
    async def tool(uid: str, turn: int) -> str:
        return "+"

    engine = make()
    found = [as_workflow(engine, calling(tool), mode).generate(batch("a", "b"), LONG) for mode in (False, True)]
    assert found[0].tokens.tolist() == found[1].tokens.tolist()
    asked = [(TOKENIZER.decode(each["prompt"]), each["seed"]) for each in server.asked]
    assert sorted(asked[:6]) == sorted(asked[6:])


def test_a_server_that_comes_back_without_weights_gets_them_between_turns(make, server):
    engine = make("rollout.server.start_timeout=30")
    engine.update_weights(4)
    returned: list[Any] = []

    async def tool(uid: str, turn: int) -> str:
        if (uid, turn) == ("a", 0):
            returned.append(come_back(server, 0.1))
        return "+"

    done = as_workflow(engine, calling(tool)).generate(batch("a", "b"), LONG)
    thread, servers = returned[0]
    thread.join()
    assert (done.lengths.tolist(), done.weight_version, servers[0].version) == ([5, 5], 4, 4)
    servers[0].close()


def test_a_group_that_is_late_twice_is_dropped_while_others_go_on(make, server):
    async def tool(uid: str, turn: int) -> str:
        return "+"

    server.hold("a")
    sampling = Sampling(n=1, max_response_tokens=16, group_timeout=1.0)
    done: Completions = as_workflow(make(), calling(tool)).generate(batch("b", "a"), sampling)
    assert done.prompt_index.tolist() == [0]
    assert done.dropped == {1: "no responses within rollout.group_timeout=1 s, twice"}


def test_a_server_that_fails_for_good_is_an_error_while_a_tool_waits(make, server):
    async def tool(uid: str, turn: int) -> str:
        if uid == "a":
            await asyncio.Event().wait()
        server.faults = ["not json"] * 9
        return "+"

    engine = make("rollout.server.retries=1")
    with pytest.raises(RunError, match="failed 2 times in a row"):
        as_workflow(engine, calling(tool)).generate(batch("a", "b"), LONG)


def test_a_thread_that_generates_ends_at_its_gate_though_a_response_never_comes(make, server):
    gate, raised = Gate(), []
    engine = make("rollout.server.request_timeout=600", gate=gate)
    server.hold("a")

    async def tool(uid: str, turn: int) -> str:
        return "+"

    def generate() -> None:
        try:
            as_workflow(engine, calling(tool)).generate(batch("a"), LONG)
        except Stopped as stopped:
            raised.append(stopped)

    thread = threading.Thread(target=generate)
    thread.start()
    wait_until(lambda: server.holding)
    gate.stop()
    thread.join()
    assert len(raised) == 1


def test_a_workflow_that_fails_waits_for_no_response(make, server):
    async def failing(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        trajectory = sampler.trajectory()
        await sampler.sample(trajectory)
        raise ValueError("a tool")

    server.hold("a")
    engine = make("rollout.server.request_timeout=600")
    with pytest.raises(RunError, match="a tool"):
        as_workflow(engine, failing).generate(batch("a", "b"), LONG)


def test_a_session_of_an_engine_that_sleeps_is_refused(make):
    engine = make()
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep or closed"):
        engine.open_session()


TOOL = """
import asyncio
import random


async def slow_tool(prompt, sampler):
    async def one(sampler):
        trajectory = sampler.trajectory()
        await sampler.sample(trajectory, max_tokens=2)
        await asyncio.sleep(random.SystemRandom().random() / 50)
        if not trajectory.truncated:
            trajectory.observe(sampler.encode("="), "=")
        if not trajectory.truncated:
            await sampler.sample(trajectory)
        return trajectory

    return await sampler.gather(one)
"""


def test_a_run_with_asynchronous_workflows_at_a_server_is_that_in_rounds(tmp_path: Path, monkeypatch):
    """A response of this server depends on the request alone."""
    monkeypatch.setenv("HWGRPO_SERVER_TOKEN", TOKEN)
    (tmp_path / "tool.py").write_text(TOOL)
    server = ModelServer(next(each for each in runs.SMALL if "model.path" in each).partition("=")[2])
    found = {}
    for way in ("false", "true"):
        runs.run(
            tmp_path / way,
            f"rollout.workflow={tmp_path}/tool.py:slow_tool",
            "rollout.engine=vllm_server",
            f"rollout.server.url={server.url}",
            "rollout.server.transfer=folder",
            "rollout.server.token_variable=HWGRPO_SERVER_TOKEN",
            f"rollout.agent.asynchronous={way}",
            "trainer.max_steps=2",
            "observe.completions_per_step=64",
        )
        found[way] = runs.everything(tmp_path / way)
    server.close()
    assert found["true"] == found["false"]
    assert len(found["true"]["completions"]) >= 32
