"""Sessions: a turn that continues the kept keys and values has the tokens of one that prefills everything."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from hwgrpo.rollout.engine import TurnRequest
from hwgrpo.rollout.local import shared_prefix_attention, slot_scheduler
from hwgrpo.rollout.local.decode_rows import DistinctRows, ModelRows
from hwgrpo.rollout.local.decoding import Decoder, Settings
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.rollout.local.slot_scheduler import Request
from hwgrpo.rollout.stopping import StopDetector
from hwgrpo.rollout.workflow import Sampler, Trajectory
from hwgrpo.rollout.workflow_engine import WorkflowEngine
from hwgrpo.values import Completions, Prompt, PromptBatch, Sampling
from tests.rollout.decoders import CPU, EXTRA, TOKENIZER, alone, engine_of, model_of, sync_every
from tests.support.devices.recorder import Recorder
from tests.support.numbers.decode_kernels_on_cpu import selected
from tests.support.numbers.rounding import BF16, assert_values_close

STOPS = tuple(range(0, len(TOKENIZER), 9))
PLAIN = Sampling(1, 14, seed=7, stop_token_ids=STOPS, temperature=1.3)


@dataclass
class Turn:
    """A request and what follows it: tokens that are observed between this turn and the next one."""

    sampling: Sampling
    observed: tuple[int, ...] = ()


@dataclass
class Scripted:
    """A trajectory whose turns are known beforehand, and what was sampled for them."""

    prompt: tuple[int, ...]
    turns: Sequence[Turn]
    name: str
    siblings: int = 1
    """Samples of its first request, of which this trajectory has number `sample`."""
    sample: int = 0
    history: list[int] = field(default_factory=list)
    found: list[dict[str, Any]] = field(default_factory=list)
    last: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.history = [*self.prompt]

    @property
    def uid(self) -> str:
        return f"{self.name}.{len(self.found)}"

    @property
    def over(self) -> bool:
        return len(self.found) == len(self.turns)

    def request(self) -> TurnRequest:
        sampling = self.turns[len(self.found)].sampling
        n = 1 if self.found else self.siblings
        prompt = Prompt(self.uid, "", tuple(self.history), None, {})
        return TurnRequest(prompt, replace(sampling, n=n), kept=True, continues=self.last)

    def append(self, number: int, columns: Any) -> None:
        sample = 0 if self.found else self.sample
        own = columns.split([1] * len(columns))[sample]
        turn = self.turns[len(self.found)]
        found = {name: getattr(own, name).tolist() for name in ("tokens", "logprobs")}
        self.found.append(found | {"text": own.texts[0], "finished": bool(own.finished[0])})
        self.history += [*own.tokens.tolist(), *turn.observed]
        self.last = (number, sample)


def scripts(seed: int = 5) -> list[Scripted]:
    """Return ragged trajectories of 1 to 4 turns, some with the same prompt and some of one group."""
    draw, done = random.Random(seed), []
    prompts = [tuple(draw.randrange(10, 60) for _ in range(length)) for length in (7, 2, 12, 1)]
    kinds = [PLAIN, replace(PLAIN, stop=("a", "1")), replace(PLAIN, top_k=5), replace(PLAIN, greedy=True)]
    for i in range(12):
        turns = []
        for t in range(1 + i % 4):
            observed = tuple(draw.randrange(10, 60) for _ in range(draw.choice([0, 1, 2, 3, 9, 30])))
            limit = draw.choice([1, 2, 5, 14])
            turns.append(Turn(replace(kinds[(i + t) % 4], max_response_tokens=limit), observed))
        done.append(Scripted(prompts[i % 3], turns, f"t{i}"))
    for sample in range(3):
        turns = [Turn(PLAIN, (20, 21)), Turn(replace(PLAIN, max_response_tokens=6), (30,) * sample), Turn(PLAIN)]
        done.append(Scripted(prompts[3], turns[: 3 - sample % 2], "group", siblings=3, sample=sample))
    for i in range(2):  # equal turns, decoded once where that is possible
        turns = [Turn(replace(PLAIN, greedy=True, max_response_tokens=4), (25, 26))] * 3
        done.append(Scripted((40, 41, 42), turns, f"equal{i}"))
    return done


class Driver:
    """Submits the turns of trajectories to a session, and gives them their responses."""

    def __init__(self, session: Any, trajectories: Sequence[Scripted]) -> None:
        self.session, self.trajectories = session, trajectories
        self.asked: dict[int, list[Scripted]] = {}

    def in_rounds(self) -> None:
        while open_ := [each for each in self.trajectories if not each.over]:
            self.submit(open_)
            while self.session.busy:
                self.session.advance()
            self.take([*self.asked])

    def at_once(self) -> None:
        """Submit a turn while other rows go on: some soon after the last one has ended, some later."""
        draw, waiting = random.Random(3), [*self.trajectories]
        while self.session.busy or waiting:
            ready = [i for i in range(len(waiting)) if draw.random() < 0.4 or not self.session.busy]
            if ready:
                self.submit([waiting[i] for i in ready])
            waiting = [each for i, each in enumerate(waiting) if i not in ready]
            waiting += self.take(self.session.advance())

    def submit(self, trajectories: Sequence[Scripted]) -> None:
        groups: dict[Any, list[Scripted]] = {}
        for each in trajectories:
            groups.setdefault((each.name, each.sample if each.found else 0), []).append(each)
        numbers = self.session.submit([group[0].request() for group in groups.values()])
        self.asked |= zip(numbers, groups.values(), strict=True)

    def take(self, ended: Sequence[int]) -> list[Scripted]:
        """Return the trajectories that go on."""
        going_on = []
        for number in ended:
            columns = self.session.take([number])
            for each in self.asked.pop(number):
                each.append(number, columns)
                if each.over:
                    self.session.release([each.last])
                else:
                    going_on.append(each)
        return going_on


def assert_as_alone(model: Any, trajectories: Sequence[Scripted]) -> None:
    """Compare each turn with full forward passes of its own sequence by the model itself."""
    for each in trajectories:
        history = [*each.prompt]
        for i, (turn, found) in enumerate(zip(each.turns, each.found, strict=True)):
            sample = 0 if i else each.sample
            key = (tuple(history), f"{each.name}.{i}", sample, turn.sampling)
            if (id(model), *key) not in ALONE:
                ALONE[id(model), *key] = alone(model, *key)
            expected = ALONE[id(model), *key]
            assert found["tokens"] == expected["tokens"], (each.name, i)
            assert (found["text"], found["finished"]) == (expected["text"], expected["finished"])
            assert_values_close(torch.tensor(found["logprobs"]), torch.tensor(expected["logprobs"]))
            history += [*found["tokens"], *turn.observed]


ALONE: dict[Any, dict[str, Any]] = {}
"""Responses that several tests compare with."""


@pytest.fixture(scope="module")
def model():
    return model_of("Qwen3")


@pytest.mark.parametrize("path", ["lean", "graph", "kernel", "kernel graph", "model"])
@pytest.mark.parametrize("slots", [3, 64])
@pytest.mark.parametrize("drive", [Driver.in_rounds, Driver.at_once])
def test_turns_are_those_that_full_forward_passes_give(model, drive, slots, path, monkeypatch):
    if path == "model":
        monkeypatch.setattr("hwgrpo.rollout.local.engine.check_lean_step", lambda *_, **__: "switched off")
    monkeypatch.setattr(shared_prefix_attention, "FIRST_CAPACITY", 4)
    with selected() if "kernel" in path else nullcontext():
        engine = engine_of(model, max_sequences=slots, recorder=Recorder() if "graph" in path else None)
        for steps in (1, 4):
            sync_every(steps, monkeypatch)
            trajectories = scripts()
            with closing(engine.open_session(120, room=100)) as session:
                drive(Driver(session, trajectories))
                assert len(session._decoder._kept) == 0, "no trajectory goes on"
                if path != "model":
                    assert_cache_is_empty(session._decoder._rows)
            assert engine.decode_path == ("model" if path == "model" else "graph" if "graph" in path else "lean")
            assert_as_alone(model, trajectories)
            assert (engine.metrics["rollout/continued_tokens"] > 0) == (path != "model")


def assert_cache_is_empty(rows: Any) -> None:
    while hasattr(rows, "_rows"):
        rows = rows._rows
    cache = rows._cache
    assert (cache._place_of, cache._holders, cache._parked, len(cache._parked_prompts)) == ({}, {}, {}, 0)


def test_the_turns_of_the_comparison_differ(model):
    trajectories = scripts()
    with closing(engine_of(model).open_session(120)) as session:
        Driver(session, trajectories).in_rounds()
    turns = [found for each in trajectories for found in each.found]
    assert {len(each.found) for each in trajectories} == {1, 2, 3, 4}
    assert len({len(turn["tokens"]) for turn in turns}) > 5
    assert {turn["finished"] for turn in turns} == {True, False}


def two_turns(count: int = 6, length: int = 5) -> list[Scripted]:
    turns = [Turn(replace(PLAIN, stop_token_ids=(), max_response_tokens=length), (20, 21, 22)), Turn(PLAIN)]
    return [Scripted((5, 6, 7 + i), turns, f"two{i}") for i in range(count)]


@pytest.mark.parametrize("steps", [1, 4])
def test_only_what_is_new_is_computed(model, steps, monkeypatch):
    sync_every(steps, monkeypatch)
    engine, trajectories = engine_of(model, max_sequences=4), two_turns()
    with closing(engine.open_session(40)) as session:
        Driver(session, trajectories).in_rounds()
    # the last token of a turn is not appended, nor is the one before where the row went on while it was not read
    known = 3 + 5 - 1 - (steps > 1)
    assert engine.metrics["rollout/continued_tokens"] == 6 * known
    assert engine.metrics["rollout/prefilled_tokens"] == 6 * 3 + 6 * (3 + 5 + 3 - known)


def test_beyond_the_limit_the_oldest_are_dropped_and_their_turns_prefilled(model, monkeypatch):
    monkeypatch.setattr(slot_scheduler, "KEPT_BYTES", 1)
    trajectories, engine = two_turns(), engine_of(model, max_sequences=2)
    with closing(engine.open_session(12)) as session:  # 24 tokens: 3 of 7 each
        driver = Driver(session, trajectories)
        driver.submit(trajectories)
        while session.busy:
            session.advance()
            assert session._decoder._kept.tokens <= 24
        assert [number in session._decoder._kept for number in range(6)] == [False] * 3 + [True] * 3
        driver.take([*driver.asked])
        driver.in_rounds()
    assert engine.metrics["rollout/continued_tokens"] == 3 * 7
    assert engine.metrics["rollout/prefilled_tokens"] == 6 * 3 + 3 * (11 - 7) + 3 * 11
    assert_as_alone(model, trajectories)


def test_small_models_keep_a_gib(model):
    with torch.no_grad():
        rows = LeanRows(model, CPU)
        number = rows.prefill([[5, 6, 7]])[0][0]
        token_bytes = rows.park(~number, 3).token_bytes
    assert token_bytes == 3 * 2 * 2 * 16 * 4, "layers, keys and values, heads, their size, fp32"
    assert slot_scheduler.most_kept_tokens(2, 12, token_bytes) == 2**30 // token_bytes
    assert slot_scheduler.most_kept_tokens(1000, 2000, token_bytes) == 2_000_000


def test_a_prompt_that_several_kept_responses_begin_with_counts_once(model):
    turns = [Turn(replace(PLAIN, stop_token_ids=(), max_response_tokens=5))]
    trajectories = [Scripted((5,) * 10, [*turns, Turn(PLAIN)], "group", siblings=3, sample=i) for i in range(3)]
    with closing(engine_of(model).open_session(40)) as session:
        driver = Driver(session, trajectories)
        driver.submit(trajectories)
        while session.busy:
            session.advance()
        assert session._decoder._kept.tokens == 10 + 3 * 4
        session.release([(0, 1)])
        assert session._decoder._kept.tokens == 10 + 2 * 4
        session.release([(0, 0), (0, 2)])
        assert session._decoder._kept.tokens == 0


def test_a_request_that_does_not_begin_with_what_it_continues_is_prefilled(model):
    trajectories, engine = two_turns(2), engine_of(model)
    with closing(engine.open_session(40)) as session:
        driver = Driver(session, trajectories)
        driver.submit(trajectories)
        while session.busy:
            session.advance()
        driver.take([*driver.asked])
        first, second = trajectories
        first.last, second.last = second.last, first.last
        first.history[1] = second.history[1] = 50
        driver.in_rounds()
    assert engine.metrics["rollout/continued_tokens"] == 0
    for each in trajectories:
        expected = alone(model, tuple(each.history[: -len(each.found[1]["tokens"])]), f"{each.name}.1", 0, PLAIN)
        assert each.found[1]["tokens"] == expected["tokens"]


def test_cancelled_requests_leave_their_slots_to_others(model):
    trajectories = two_turns(5, length=12)
    with closing(engine_of(model, max_sequences=2).open_session(60)) as session:
        driver = Driver(session, trajectories)
        driver.submit(trajectories)
        session.advance()
        session.cancel([1, 3])
        while session.busy:
            assert not {*session.advance()} & {1, 3}
        kept = [trajectories[i] for i in (0, 2, 4)]
        del driver.asked[1], driver.asked[3]
        driver.take([0, 2, 4])
        driver.trajectories = kept
        driver.in_rounds()
    assert_as_alone(model, kept)


class Updated:
    """A model whose weights change once, and the version."""

    def __init__(self) -> None:
        self.model, self.version = model_of("Qwen3"), 0

    def update(self) -> None:
        self.version = 1
        with torch.no_grad():
            self.model.model.norm.weight.mul_(0.9)
            self.model.model.layers[0].self_attn.q_norm.weight.mul_(1.2)


def test_kept_keys_and_values_are_those_of_older_weights_after_an_update():
    of = Updated()
    settings = [Settings(PLAIN, StopDetector(TOKENIZER, (), ()))]
    lean = LeanRows(of.model, CPU)
    decoder = Decoder(DistinctRows(lean), 2, CPU, settings, apply_new_weights=lambda: of.version)

    def response(request: Request) -> dict[str, np.ndarray]:
        decoder.submit(request)
        with torch.no_grad():
            ended, held = [], []
            for responses in decoder.run():
                ended += responses
                held.append(len(lean._cache._parked))
        assert held == [request.continues is not None] + [0] * (request.limit - 1), "a copy until the first step"
        return ended[0].per_token

    prompt, observed = (5, 6, 7), (20, 21)
    first = response(Request(prompt, 50, 6, kept=True))["tokens"].tolist()
    history = (*prompt, *first, *observed)
    with torch.no_grad():
        before = of.model(input_ids=torch.tensor([history[:8]]), use_cache=True).past_key_values
    of.update()
    second = response(Request(history, 51, 4, continues=0))
    tokens = second["tokens"].tolist()
    assert second["versions"].tolist() == [1] * 4
    assert decoder.continued_tokens == 8
    with torch.no_grad():
        rest = torch.tensor([[*history[8:], *tokens]])
        logits = of.model(input_ids=rest, past_key_values=before, use_cache=True).logits[0, 2:-1]
        renewed = of.model(input_ids=torch.tensor([[*history, *tokens]]), use_cache=False).logits[
            0, len(history) - 1 : -1
        ]
    logprobs = [(each / 1.3).log_softmax(-1)[range(4), tokens] for each in (logits, renewed)]
    assert_values_close(torch.from_numpy(second["logprobs"]), logprobs[0])
    assert float((logprobs[0] - logprobs[1]).abs().max()) > 1e-3, "other than those of a new prefill"


@pytest.mark.parametrize("family", EXTRA)
def test_every_architecture_continues(family):
    model = model_of(family)
    prompts, sampled = ([5, 6, 7, 8], [9, 10]), [20, 21, 22, 23, 24, 25]
    longer = [[*prompts[0], *sampled, 30, 31, 32], [*prompts[1], *sampled[:3], 33]]
    rows = LeanRows(model, CPU)
    with torch.no_grad():
        numbers = np.array(rows.prefill(prompts)[0])
        rows.arrange(~numbers, np.array([6, 6]))
        for token in sampled:
            rows.step(torch.tensor([token, token]))
        parked = [rows.park(0, 10), rows.park(1, 5)]
        rows.free(numbers.tolist())
        again, last = rows.extend(parked, longer)
        rows.arrange(~np.array(again)[::-1], np.array([1, 1]))
        stepped = rows.step(torch.tensor([40, 41]))
        for i, (sequence, token) in enumerate(zip(longer, (41, 40), strict=True)):
            whole = model(input_ids=torch.tensor([[*sequence, token]]), use_cache=False).logits[0]
            assert_values_close(last[i], whole[-2])
            assert_values_close(stepped[1 - i], whole[-1])


def test_what_many_observed_tokens_cost_is_not_paid_by_others(model, monkeypatch):
    forwards: list[tuple[int, ...]] = []
    plain = ModelRows.prefill_after

    def counted(self, cache, firsts, sequences, images):
        forwards.append(tuple(len(each) - first for each, first in zip(sequences, firsts, strict=True)))
        return plain(self, cache, firsts, sequences, images)

    monkeypatch.setattr(ModelRows, "prefill_after", counted)
    rows = LeanRows(model, CPU)
    with torch.no_grad():
        rows.arrange(~np.array(rows.prefill([[5, 6, 7]])[0]), np.array([1]))
        rows.step(torch.tensor([8]))
        parked = rows.park(0, 4)
        sequences = [[5, 6, 7, 8, *range(10, 10 + new)] for new in (40, 1, 3, 2)]
        _, logits = rows.extend([parked] * 4, sequences)
        for each, sequence in zip(logits, sequences, strict=True):
            assert_values_close(each, model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, -1])
    assert forwards == [(2, 2), (3,), (40,)]


def test_turns_with_adapters_are_those_of_the_peft_model():
    wrapped: Any = get_peft_model(model_of("Qwen3"), LoraConfig(r=4, target_modules="all-linear")).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    trajectories = scripts()[:8]
    engine = engine_of(wrapped, max_sequences=3)
    with closing(engine.open_session(120)) as session:
        Driver(session, trajectories).at_once()
    assert engine.metrics["rollout/continued_tokens"] > 0
    assert_as_alone(wrapped, trajectories)


def test_turns_of_a_copy_in_bf16_have_its_log_probs(model):
    engine = engine_of(model, max_sequences=3, compute_dtype=torch.bfloat16)
    trajectories = scripts()
    with closing(engine.open_session(120)) as session:
        Driver(session, trajectories).in_rounds()
    assert engine.metrics["rollout/continued_tokens"] > 0
    worst = []
    for each in trajectories:
        history = [*each.prompt]
        for turn, found in zip(each.turns, each.found, strict=True):
            tokens, sampling = found["tokens"], turn.sampling
            ids = torch.tensor([[*history, *tokens]])
            if sampling.top_k == 0 and not sampling.greedy:
                with torch.no_grad():
                    logits = engine._sampler(input_ids=ids, use_cache=False).logits[0, len(history) - 1 : -1].float()
                logprobs = (logits / sampling.temperature).log_softmax(-1)[range(len(tokens)), tokens]
                assert_values_close(torch.tensor(found["logprobs"]), logprobs, BF16)
                worst.append(len(history))
            history += [*tokens, *turn.observed]
    assert len({*worst}) > 10


class WithoutSessions:
    """Another engine's `generate`, so that workflows prefill every turn."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        return self.engine.generate(batch, sampling)


def workflow_of(seed: int) -> Any:
    """Return a workflow of 1 to 4 turns, whose tools take as long as `seed` says."""
    draw = random.Random(seed)

    async def turns(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        async def one(sampler: Sampler) -> Trajectory:
            trajectory = sampler.trajectory()
            for turn in range(4):
                segment = await sampler.sample(trajectory, max_tokens=3 + 4 * turn)
                if trajectory.truncated or sum(segment.token_ids) % 5 == 0:
                    break
                await asyncio.sleep(draw.choice([0, 0, 0.002, 0.01]))
                trajectory.observe([10 + token % 40 for token in segment.token_ids[:3]], "t")
            return trajectory

        return [*await sampler.gather(one), *await sampler.responses()]

    return turns


@pytest.mark.parametrize("slots", [3, 64])
def test_workflows_have_the_same_tokens_with_and_without_sessions_and_asynchronously(model, slots):
    batch = PromptBatch(tuple(Prompt(str(i), "", (5, 6 + i, 7), None, {}) for i in range(5)))
    sampling = replace(PLAIN, n=4, max_response_tokens=40)
    inner = replace(sampling, n=2)
    engine = engine_of(model, max_sequences=slots)

    def generate(sampled_by: Any, seed: int, asynchronous: bool = False) -> tuple[Completions, dict[str, float]]:
        async def halved(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
            sampler._sampling = inner
            return await workflow_of(seed)(prompt, sampler)

        each = WorkflowEngine(sampled_by, halved, "w.py:run", TOKENIZER, 60.0, asynchronous=asynchronous)
        return each.generate(batch, sampling), each.metrics

    whole, _ = generate(WithoutSessions(engine), 0)
    rounds, metrics = generate(engine, 1)
    again, _ = generate(engine, 2)
    at_once, metrics_at_once = generate(engine, 3, asynchronous=True)
    assert metrics["rollout/continued_tokens"] > 0 < metrics_at_once["rollout/continued_tokens"]
    assert metrics["rollout/turns/mean"] > 1.5
    assert torch.equal(rounds.logprobs, again.logprobs), "rounds do not depend on how long tools take"
    for each in (rounds, at_once):
        assert each.token_lists() == whole.token_lists()
        assert each.texts == whole.texts
        assert each.finished.tolist() == whole.finished.tolist()
        assert_values_close(each.logprobs, whole.logprobs)
