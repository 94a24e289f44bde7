"""Deadlines of groups in every engine: a late group is dispatched again once, then dropped; the others are as ever."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwgrpo.catalog import ENGINES
from hwgrpo.errors import ConfigError
from hwgrpo.rollout import deadlines
from hwgrpo.rollout.deadlines import GroupDeadlines, late_groups
from hwgrpo.rollout.local.decoding import Decoder
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.rollout.requests import Sample, make_completions
from hwgrpo.rollout.server.engine import ServerEngine
from hwgrpo.rollout.vllm.timed_generation import generate_in_time
from hwgrpo.support import waits
from hwgrpo.values import Completions, Sampling
from tests.rollout.served import TOKENIZER, batch, parts_for
from tests.rollout.server.fake_sglang import FakeSglang
from tests.support.models.tiny import settings, tiny_qwen3
from tests.support.servers.fake_server import TOKEN, FakeServer

TEXTS = ("ab", "c", "ba", "cc")
STEPS = 24
TWICE = "no responses within rollout.group_timeout={} s, twice"


class Clock:
    """A clock that stands still."""

    now = 100.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadlines, "monotonic", lambda: clock.now)
    return clock


def test_groups_are_late_from_their_deadline_on():
    assert late_groups({0: 1.0, 1: 3.0, 2: 2.0}, 7.0, 5.0) == [0, 2]
    assert late_groups({}, 7.0, 5.0) == []


def test_a_group_has_two_deadlines_of_its_own(clock):
    groups = GroupDeadlines(3, 10)
    groups.dispatch(0)
    clock.now += 4
    groups.dispatch(1)
    groups.dispatch(2)
    groups.finish(2)
    for later, expected in (
        (5.9, []),
        (0.1, [(0, True)]),
        (3.9, []),
        (0.1, [(1, True)]),
        (6, [(0, False)]),
        (99, [(1, False)]),
    ):
        clock.now += later
        assert groups.misses() == expected
    assert groups.misses() == []


def engine_of(max_sequences: int = 64) -> tuple[LocalEngine, Clock]:
    """Return a local engine, and a clock that goes on by a second with each of its forward passes."""
    torch.manual_seed(1)
    model = tiny_qwen3(vocab=len(TOKENIZER)).eval()
    engine = LocalEngine(
        model, TOKENIZER, device=torch.device("cpu"), compute_dtype=torch.float32, max_sequences=max_sequences
    )
    clock, plain = Clock(), engine._apply_new_weights

    def tick() -> int:
        clock.now += 1
        return plain()

    engine._apply_new_weights = tick
    return engine, clock


def sampling(timeout: float | None, **more: Any) -> Sampling:
    """Return settings under which some responses end early: every ninth token of the vocabulary ends one."""
    stops = tuple(range(0, len(TOKENIZER), 9))
    return Sampling(3, STEPS, seed=5, stop_token_ids=stops, group_timeout=timeout, **more)


def group(completions: Completions, prompt: int) -> list[Any]:
    """Return tokens, log-probs, ends and texts of a prompt's responses."""
    found = []
    for i in (completions.prompt_index == prompt).nonzero()[:, 0].tolist():
        part = slice(int(completions.offsets[i]), int(completions.offsets[i + 1]))
        found.append(
            [
                completions.tokens[part].tolist(),
                completions.logprobs[part].tolist(),
                bool(completions.finished[i]),
                completions.texts[i],
            ]
        )
    return found


def assert_only_dropped(found: Completions, whole: Completions, dropped: set[int], timeout: float) -> None:
    assert dict(found.dropped) == dict.fromkeys(sorted(dropped), TWICE.format(f"{timeout:g}"))
    for prompt in range(len(TEXTS)):
        assert group(found, prompt) == ([] if prompt in dropped else group(whole, prompt))
    assert found.offsets.tolist()[-1] == len(found.tokens) == len(found.logprobs)
    assert len(found.offsets) == len(found.texts) + 1 == len(found.prompt_index) + 1


def longest(whole: Completions) -> list[int]:
    """Return the length of each prompt's longest response."""
    return [max(len(tokens) for tokens, *_ in group(whole, prompt)) for prompt in range(len(TEXTS))]


@pytest.mark.parametrize("timeout", [2, 3, 4, 5])
def test_the_local_engine_drops_the_groups_that_decode_longer_than_two_deadlines(monkeypatch, timeout: int):
    engine, clock = engine_of()
    monkeypatch.setattr(deadlines, "monotonic", lambda: clock.now)
    whole = engine.generate(batch(*TEXTS), sampling(None))
    assert (whole.late, whole.dropped) == (None, {})
    lengths = longest(whole)
    began = clock.now
    found = engine.generate(batch(*TEXTS), sampling(timeout))
    # a response of k tokens needs k passes; one that has ended at a deadline is in time
    dropped = {prompt for prompt, length in enumerate(lengths) if length > 2 * timeout}
    assert 0 < len(dropped) < len(TEXTS), lengths
    assert clock.now - began == 2 * timeout
    assert found.late == sum(length > timeout for length in lengths)
    assert_only_dropped(found, whole, dropped, timeout)


def test_a_deadline_that_nobody_misses_changes_nothing(monkeypatch):
    engine, clock = engine_of()
    monkeypatch.setattr(deadlines, "monotonic", lambda: clock.now)
    whole, found = (engine.generate(batch(*TEXTS), sampling(timeout)) for timeout in (None, 1000))
    assert found.late == 0
    assert_only_dropped(found, whole, set(), 1000)


def simulated(lengths: list[list[int]], slots: int, timeout: int) -> tuple[set[int], set[int]]:
    """Return the dropped and the late groups of responses in slots that are refilled; a pass takes a second.

    A response's first token comes with the pass of its prompt, which the first response of a group needs.
    """
    queue = [[group, length] for group, each in enumerate(lengths) for length in each]
    left = [len(each) for each in lengths]
    rows: list[list[int]] = []
    now, begun = 0, {}
    late: set[int] = set()
    dropped: set[int] = set()

    def read(drawn: list[list[int]]) -> None:
        for row in drawn:
            row[1] -= 1
            left[row[0]] -= not row[1]
        rows[:] = [row for row in rows if row[1]]
        for group, since in begun.items():
            if left[group] and group not in dropped and now - since >= timeout:
                (dropped if group in late else late).add(group)
                begun[group] = now
        for each in (rows, queue):
            each[:] = [row for row in each if row[0] not in dropped]

    while queue or rows:
        while queue and len(rows) < slots:
            admitted = [queue.pop(0) for _ in range(min(len(queue), slots - len(rows)))]
            prompts = {group for group, _ in admitted} - set(begun)
            begun |= dict.fromkeys(prompts, now)
            now += bool(prompts)
            rows += admitted
            read(admitted)
        now += bool(rows)
        read([*rows])
    return dropped, late


@pytest.mark.parametrize(("slots", "timeout"), [(2, 4), (2, 5), (2, 6), (3, 3), (3, 5), (4, 4)])
def test_the_time_of_a_group_begins_when_its_first_response_gets_a_slot(monkeypatch, slots: int, timeout: int):
    engine, clock = engine_of(slots)
    monkeypatch.setattr(deadlines, "monotonic", lambda: clock.now)
    as_needed = partial(Decoder, prefill_ahead=0)  # not those of further responses
    monkeypatch.setattr(
        "hwgrpo.rollout.local.engine.Decoder", lambda *these, prefill_ahead, **more: as_needed(*these, **more)
    )
    whole = engine.generate(batch(*TEXTS), sampling(None))
    lengths = [[len(tokens) for tokens, *_ in group(whole, prompt)] for prompt in range(len(TEXTS))]
    found = engine.generate(batch(*TEXTS), sampling(timeout))
    dropped, late = simulated(lengths, slots, timeout)
    assert 0 < len(late) < len(TEXTS) or 0 < len(dropped) < len(TEXTS), lengths
    assert_only_dropped(found, whole, dropped, timeout)
    assert found.late == len(late)


def test_all_groups_may_be_dropped(monkeypatch):
    engine, clock = engine_of()
    monkeypatch.setattr(deadlines, "monotonic", lambda: clock.now)
    found = engine.generate(batch(*TEXTS), Sampling(2, STEPS, group_timeout=0.5))
    assert len(found) == 0
    assert [*found.dropped] == [*range(len(TEXTS))]
    assert found.offsets.tolist() == [0]
    assert (found.newest_version, found.late) == (0, len(TEXTS))


@pytest.fixture(params=["vllm_server", "sglang_server"])
def server(request, monkeypatch):
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    server: Any = (FakeServer if request.param == "vllm_server" else FakeSglang)()
    server.kind, server.closed = request.param, []
    yield server
    server.close()


@pytest.fixture
def make(server, tmp_path):
    engines = []

    def make(*overrides: str) -> ServerEngine:
        parts = parts_for(server.url, tmp_path, f"rollout.engine={server.kind}", *overrides)
        engines.append(ENGINES.load(server.kind).make(parts))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def stick(server: Any, text: str, times: int, meanwhile: Callable[[], Any] = lambda: None) -> None:
    """Have the server leave a prompt without an answer, so many times, until the connection is closed."""
    plain, stuck = type(server)._misbehave, TOKENIZER(text).input_ids
    server.closed.clear()

    def misbehave(request: Any, asked: dict[str, Any], fault: Any) -> None:
        if asked.get("prompt", asked.get("input_ids", [None])[0]) == stuck and len(server.closed) < times:
            meanwhile()
            request.connection.settimeout(20)
            server.closed.append(request.connection.recv(1) == b"")
            return None
        return plain(server, request, asked, fault)

    server._misbehave = misbehave


def asked_for(server: Any, text: str) -> list[dict[str, Any]]:
    """Return the requests for a prompt."""
    stuck = TOKENIZER(text).input_ids
    return [asked for asked in server.asked if asked.get("prompt", asked.get("input_ids", [None])[0]) == stuck]


TIMEOUT = 0.5


def test_a_request_that_is_stuck_is_aborted_and_sent_again_with_the_same_seed(make, server):
    engine = make()
    whole = engine.generate(batch(*TEXTS), Sampling(2, 3))
    server.asked.clear()
    stick(server, "c", 1)
    found = engine.generate(batch(*TEXTS), Sampling(2, 3, group_timeout=2.0))
    assert_only_dropped(found, whole, set(), 2.0)
    assert found.late == 1
    first, second = asked_for(server, "c")
    assert first == second
    assert len(server.asked) == len(TEXTS) + 1


def test_a_request_that_stays_stuck_costs_its_group_alone_and_is_no_failure_of_the_server(make, server):
    engine = make("rollout.server.retries=0", "rollout.server.request_timeout=600")
    whole = engine.generate(batch(*TEXTS), Sampling(2, 3))
    taken = len(server.taken)
    server.asked.clear()
    stick(server, "c", 9)
    began = time.monotonic()
    found = engine.generate(batch(*TEXTS), Sampling(2, 3, group_timeout=TIMEOUT))
    assert time.monotonic() - began >= 2 * TIMEOUT
    assert_only_dropped(found, whole, {1}, TIMEOUT)
    assert found.late == 1
    assert len(asked_for(server, "c")) == 2
    assert server.closed == [True, True], "the server is not left with requests that nobody waits for"
    assert (engine.metrics["rollout/server_retries"], engine.metrics["rollout/server_restarts"]) == (0, 0)
    assert len(server.taken) == taken


def test_a_server_that_has_lost_its_weights_is_recovered_and_the_group_is_not_late(make, server):
    engine = make()
    whole = engine.generate(batch(*TEXTS), Sampling(2, 3))
    taken = len(server.taken)

    def lose() -> None:
        server.label = "-1" if server.kind == "vllm_server" else "default"

    stick(server, "c", 1, lose)
    found = engine.generate(batch("c"), Sampling(2, 3, group_timeout=TIMEOUT))
    assert (found.late, found.dropped) == (0, {})
    assert group(found, 0) == group(whole, 1)
    assert engine.metrics["rollout/server_retries"] == 1
    assert len(server.taken) == taken + 1


def test_a_long_wait_is_reported_with_the_number_of_groups(make, server, monkeypatch, capfd):
    engine = make()
    monkeypatch.setattr(deadlines, "REPORT_CHECK", 0.05)
    stick(server, "c", 9)
    engine.generate(batch(*TEXTS), Sampling(2, 3, group_timeout=TIMEOUT))
    said = capfd.readouterr().err
    assert said.count("hwgrpo: waiting for the responses of 1 of 4 groups: ") == 1, said
    assert f"dropped the responses of 1 of 4 groups: {TWICE.format('0.5')}" in said
    monkeypatch.setattr(deadlines, "LONG_WORK", 0.2)
    monkeypatch.setattr(engine._settings, "request_timeout", 0.5)
    stick(server, "c", 1)
    engine.generate(batch("c"), Sampling(2, 3))  # without a deadline, too
    assert "waiting for the responses of 1 of 1 groups: " in capfd.readouterr().err


def report_often(monkeypatch) -> None:
    """Have every wait reported from its begin on."""
    monkeypatch.setattr(deadlines, "REPORT_CHECK", 0.01)
    monkeypatch.setattr(deadlines, "LONG_WORK", 0.0)
    monkeypatch.setattr(waits, "REPORT_EVERY", 0.0)


def test_a_long_wait_for_the_local_engine_is_reported_without_a_deadline(monkeypatch, capfd):
    engine, _ = engine_of(6)
    report_often(monkeypatch)
    plain = engine._apply_new_weights
    monkeypatch.setattr(engine, "_apply_new_weights", lambda: (time.sleep(0.02), plain())[1])
    engine.generate(batch(*TEXTS), sampling(None))
    said = capfd.readouterr().err
    assert "hwgrpo: waiting for the responses of 4 of 4 groups: " in said
    assert said.count("hwgrpo: waiting for the responses of ") > said.count(" of 4 of 4 groups: "), "some have ended"


class VllmCore:
    """`LLMEngine` as far as `generate_in_time` uses it: a request of k tokens needs k steps of a second each.

    Args:
        clock: goes on with the steps.
        needs: request id -> tokens of each dispatch in turn.
    """

    def __init__(self, clock: Clock, needs: dict[str, list[float]]) -> None:
        self._clock, self._needs = clock, needs
        self._running: dict[str, list[Any]] = {}
        self.events: list[Any] = []

    def add_request(self, request_id: str, prompt: Any, params: Any, lora_request: Any = None) -> str:
        assert not any(own == request_id for own, _ in self._running.values()), "it is still running"
        internal = f"{request_id}-{len(self.events)}"
        self._running[internal] = [request_id, self._needs[request_id].pop(0)]
        self.events.append(("add", request_id, prompt, params, lora_request, self._clock.now))
        return internal

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def step(self) -> list[Any]:
        self._clock.now += 1
        done = []
        for internal, request in [*self._running.items()]:
            request[1] -= 1
            if request[1] <= 0:
                del self._running[internal]
                done.append(SimpleNamespace(request_id=request[0], finished=True))
        return done

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        assert internal
        for each in request_ids:
            self.events.append(("abort", self._running.pop(each)[0], self._clock.now))


def test_vllm_in_this_process_is_asked_again_once_and_then_the_group_is_dropped(clock):
    began = clock.now
    core = VllmCore(clock, {"0": [2], "1": [99, 3], "2": [99, 99], "3": [5]})
    groups = GroupDeadlines(4, 5)
    prompts = [{"prompt_token_ids": [i]} for i in range(4)]
    found = generate_in_time(core, prompts, ["a", "b", "c", "d"], "adapter", groups)
    assert [output and output.request_id for output in found] == ["0", "1", None, "3"]
    again = [event for event in core.events if event[-1] > began]
    assert again == [
        ("abort", "1", began + 5),
        ("add", "1", prompts[1], "b", "adapter", began + 5),
        ("abort", "2", began + 5),
        ("add", "2", prompts[2], "c", "adapter", began + 5),
        ("abort", "2", began + 10),
    ]
    assert clock.now == began + 10
    group = [Sample([5], [-0.5], True)]
    made = make_completions([group, group, None, group], [Sampling(1, 4)] * 4, TOKENIZER, [], 3)
    kept = groups.apply(made)
    assert kept.prompt_index.tolist() == [0, 1, 3]
    assert (kept.late, [*kept.dropped]) == (2, [2])


def test_a_dropped_group_takes_the_versions_of_its_weights_with_it():
    groups = GroupDeadlines(2, 5)
    assert [groups.miss(0), groups.miss(0)] == [True, False]
    made = make_completions([[Sample([5, 6], [-0.5, -0.5], True)]] * 2, [Sampling(1, 4)] * 2, TOKENIZER, [], 3)
    floors = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    kept = groups.apply(replace(made, versions=torch.tensor([3, 4, 5, 6]), floors=floors))
    assert kept.versions is not None
    assert kept.floors is not None
    assert kept.floors.tolist() == [-3.0, -4.0]
    assert (kept.weight_version, kept.newest_version, kept.versions.tolist()) == (5, 6, [5, 6])


def test_a_batch_of_dropped_groups_alone_has_no_responses():
    found = make_completions([None, None], [Sampling(2, 4)] * 2, TOKENIZER, [], 3)
    assert len(found) == 0
    assert found.weight_version == found.newest_version == 3
    assert [t.dtype for t in (found.prompt_index, found.tokens, found.offsets)] == [torch.int64] * 3


def test_a_deadline_after_which_the_run_counts_as_hung_is_refused():
    with pytest.raises(ConfigError, match=r"rollout.group_timeout=50: .*process_group_timeout=100 s.*use less than 50"):
        settings("rollout.group_timeout=50", "trainer.process_group_timeout=100")
    assert settings("rollout.group_timeout=49", "trainer.process_group_timeout=100").rollout.group_timeout == 49
    with pytest.raises(ConfigError, match="group_timeout"):
        settings("rollout.group_timeout=0")
