"""Slots that are refilled: tokens are those of each response alone, in whatever slots, order and company."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hwgrpo.rollout.counter_rng import stream_keys
from hwgrpo.rollout.local import shared_prefix_attention
from hwgrpo.rollout.local.decode_graph import RecordedRows
from hwgrpo.rollout.local.decode_rows import DistinctRows, ModelRows
from hwgrpo.rollout.local.decoding import Decoder, Settings
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.rollout.local.slot_scheduler import Request, decode_steps
from hwgrpo.rollout.stopping import StopDetector
from hwgrpo.values import Completions, Prompt, PromptBatch, Sampling
from tests.rollout.decoders import CPU, TOKENIZER, alone, engine_of, model_of, sync_every
from tests.support.devices.recorder import Recorder
from tests.support.numbers.rounding import assert_values_close

STOPS = tuple(range(0, len(TOKENIZER), 9))
PLAIN = Sampling(3, 24, seed=7, stop_token_ids=STOPS, temperature=1.3)
MIXED: list[tuple[tuple[int, ...], Sampling]] = [
    ((5, 6, 7, 8, 9, 10, 11), replace(PLAIN, n=4)),
    ((12, 13), replace(PLAIN, n=2, max_response_tokens=9, top_k=5)),
    ((14, 15, 16, 17), replace(PLAIN, n=1, max_response_tokens=24, greedy=True)),
    ((5, 6, 7, 8, 9, 10, 11), replace(PLAIN, n=3, max_response_tokens=1)),
    ((20,) * 12, replace(PLAIN, n=3, top_p=0.7, temperature=0.8)),
    ((30,), replace(PLAIN, n=3, max_response_tokens=24, min_p=0.1, stop=("a", "1"))),
    ((12, 13), replace(PLAIN, n=2, max_response_tokens=17)),
]
"""Prompts of different lengths, some of them equal, with limits, filters and numbers of samples of their own."""


def requests_of(pairs) -> tuple[PromptBatch, list[Sampling]]:
    prompts = tuple(Prompt(str(i), "", ids, None, {}) for i, ids, _ in pairs)
    return PromptBatch(prompts), [sampling for _, _, sampling in pairs]


NUMBERED = [(i, ids, sampling) for i, (ids, sampling) in enumerate(MIXED)]


@pytest.fixture(scope="module")
def model():
    return model_of("Qwen3")


@pytest.fixture(scope="module")
def expected(model) -> dict[int, list[dict[str, Any]]]:
    """Prompt's number -> its responses, each decoded alone."""
    return {
        i: [alone(model, ids, str(i), sample, sampling) for sample in range(sampling.n)]
        for i, ids, sampling in NUMBERED
    }


def assert_are(found: Completions, numbers: list[int], expected: dict[int, list[dict[str, Any]]]) -> None:
    assert found.prompt_index.tolist() == [i for i, number in enumerate(numbers) for _ in expected[number]]
    responses = [response for number in numbers for response in expected[number]]
    assert found.token_lists() == [each["tokens"] for each in responses]
    assert found.texts == tuple(each["text"] for each in responses)
    assert found.finished.tolist() == [each["finished"] for each in responses]
    assert_values_close(found.logprobs, torch.tensor([value for each in responses for value in each["logprobs"]]))
    floors = torch.tensor([value for each in responses for value in each["floors"]])
    assert found.floors is not None
    assert torch.equal(found.floors == -torch.inf, floors == -torch.inf)
    finite = floors > -torch.inf
    assert_values_close(found.floors[finite], floors[finite])


ORDERS = {
    "in order": NUMBERED,
    "reversed": NUMBERED[::-1],
    "shuffled": random.Random(4).sample(NUMBERED, len(NUMBERED)),
}


def test_the_responses_of_the_comparison_differ_in_length(expected):
    lengths = [len(each["tokens"]) for group in expected.values() for each in group]
    assert (min(lengths), max(lengths)) == (1, 24)
    assert len(set(lengths)) > 6


@pytest.mark.parametrize("path", ["lean", "graph", "model"])
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("order", ORDERS)
def test_tokens_are_those_of_each_response_alone(model, expected, order, slots, path, monkeypatch):
    if path == "model":
        monkeypatch.setattr("hwgrpo.rollout.local.engine.check_lean_step", lambda *_, **__: "switched off")
    engine = engine_of(model, max_sequences=slots, recorder=Recorder() if path == "graph" else None)
    for steps in (1, 4):
        sync_every(steps, monkeypatch)
        found = engine.generate_each(*requests_of(ORDERS[order]))
        assert engine.decode_path == path
        assert_are(found, [number for number, *_ in ORDERS[order]], expected)
        drawn = round(len(found.tokens) / engine.metrics["perf/rollout_live_rows"])
        assert drawn == len(found.tokens) if slots == 1 and steps == 1 else drawn >= len(found.tokens)


@pytest.mark.parametrize("path", ["lean", "graph"])
@pytest.mark.parametrize("others", [(8, 9, 10), (8, 9)], ids=["equal prompts", "padded prompts"])
def test_a_last_response_that_ends_with_its_first_token_leaves_the_others_their_prompts(
    model, others, path, monkeypatch
):
    sync_every(1, monkeypatch)  # its wider prompt is prefilled and read, and no row is begun for it
    long = Sampling(9, 40, seed=3, temperature=1.3)
    pairs = [(0, (5, 6, 7), long)]
    pairs += [(i, (others[0] + i, *others[1:]), replace(long, n=1, max_response_tokens=3)) for i in range(1, 7)]
    pairs.append((7, (11,) * 9, replace(long, n=1, max_response_tokens=1)))
    engine = engine_of(model, max_sequences=10, recorder=Recorder() if path == "graph" else None)
    found = engine.generate_each(*requests_of(pairs))
    responses = {i: [alone(model, ids, str(i), k, each) for k in range(each.n)] for i, ids, each in pairs}
    assert found.token_lists() == [each["tokens"] for of_prompt in responses.values() for each in of_prompt]


@pytest.mark.parametrize("slots", [2, 5])
def test_rows_without_shared_duplicates_are_refilled_as_well(model, expected, slots, monkeypatch):
    monkeypatch.setattr("hwgrpo.rollout.local.engine.DistinctRows", lambda rows: rows)
    engine = engine_of(model, max_sequences=slots)
    assert_are(engine.generate_each(*requests_of(NUMBERED)), [*range(len(MIXED))], expected)


def test_prompts_that_cannot_be_padded_are_prefilled_by_length(model, expected):
    engine = engine_of(model, max_sequences=5)
    engine._supports_padding = False
    assert_are(engine.generate_each(*requests_of(NUMBERED)), [*range(len(MIXED))], expected)


def test_one_setting_for_all_is_a_call_of_generate(model, expected):
    engine = engine_of(model, max_sequences=2)
    (number, ids, sampling) = NUMBERED[0]
    found = engine.generate(PromptBatch((Prompt(str(number), "", ids, None, {}),)), sampling)
    assert found.token_lists() == [each["tokens"] for each in expected[0]]
    assert found.floors is None


def settings(stop_token_ids=STOPS) -> list[Settings]:
    return [Settings(PLAIN, StopDetector(TOKENIZER, stop_token_ids, ()))]


def lengths_forced(lengths: list[int]) -> list[Request]:
    """Return requests whose limits are these lengths, two per prompt."""
    return [
        Request((5 + i // 2 % 20, 7, 9 + i // 2 % 3), int(stream_keys(1, [str(i)], [0])[0]), length, 0, i // 2)
        for i, length in enumerate(lengths)
    ]


def run(decoder: Decoder) -> list[Any]:
    with torch.no_grad():
        return sorted((each for ended in decoder.run() for each in ended), key=lambda each: each.number)


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 40])
def test_the_number_of_decode_steps_is_the_simulated_one(model, slots):
    lengths = [*np.random.default_rng(slots).integers(1, 30, 24).tolist(), 1, 1]
    decoder = Decoder(DistinctRows(LeanRows(model, CPU)), slots, CPU, settings(()))
    for request in lengths_forced(lengths):
        decoder.submit(request)
    found = run(decoder)
    assert [len(each.per_token["tokens"]) for each in found] == lengths
    assert decoder.steps == decode_steps(lengths, slots)


class Counted(LeanRows):
    """Rows that count the prompts of each prefill, and the calls of `free`."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.prefilled: list[int] = []
        self.freed: list[int] = []

    def prefill(self, prompts):
        self.prefilled.append(len(prompts))
        return super().prefill(prompts)

    def free(self, numbers):
        self.freed += numbers
        super().free(numbers)


@pytest.mark.parametrize("fixed", [False, True], ids=["plain", "fixed"])
def test_a_prompt_is_prefilled_once_and_held_until_its_last_response_has_ended(model, fixed):
    rows = Counted(model, CPU, fixed=fixed)
    decoder = Decoder(rows, 2, CPU, settings(()))
    again = Request((5, 6), 9, 4, 0, 3)
    for request in (*[Request((5, 6), i, 3 + 2 * i, 0, 0) for i in range(5)], Request((8,), 5, 3, 0, 1), again):
        decoder.submit(request)
    ended: list[int] = []
    with torch.no_grad():
        for responses in decoder.run():
            ended += [each.number for each in responses]
            held = set(range(2)) - set(rows.freed)
            assert (0 in held) == (len({*ended} & {0, 1, 2, 3, 4, 6}) < 6)
    assert rows.prefilled == [1, 1]
    assert sorted(rows.freed) == [0, 1]
    assert rows._cache._place_of == {}


def test_prompts_of_the_queue_are_prefilled_with_those_that_are_needed(model):
    submitted = [
        Request((5 + group,), 8 * group + sample, 2 + sample, 0, group) for group in range(6) for sample in range(2)
    ]
    found = {}
    for ahead in (0, 4):
        rows = Counted(model, CPU)
        decoder = Decoder(rows, 2, CPU, settings(()), prefill_ahead=ahead)
        for request in submitted:
            decoder.submit(request)
        found[ahead] = [each.per_token["tokens"].tolist() for each in run(decoder)]
        assert rows.prefilled == {0: [1] * 6, 4: [3, 3]}[ahead]
        assert rows._cache._place_of == {}
    assert found[0] == found[4]


def test_requests_may_come_while_others_are_decoded(model):
    decoder = Decoder(LeanRows(model, CPU), 3, CPU, settings(()))
    early, late = lengths_forced([4, 9, 2, 6, 12]), [Request((40, 41, 42, 43, 44), 77, 8, 0, 9)]
    whole = Decoder(LeanRows(model, CPU), 64, CPU, settings(()))
    for request in (*early, *late):
        whole.submit(request)
    for request in early:
        decoder.submit(request)
    found, waiting = [], [*late]
    with torch.no_grad():
        for ended in decoder.run():
            found += ended
            if len(found) >= 2 and waiting:
                assert decoder.submit(waiting.pop()) == len(early)
    assert [each.per_token["tokens"].tolist() for each in sorted(found, key=lambda each: each.number)] == [
        each.per_token["tokens"].tolist() for each in run(whole)
    ]


def test_a_group_that_is_dropped_frees_its_slots_and_its_prompt(model):
    rows = Counted(model, CPU)
    decoder = Decoder(rows, 3, CPU, settings(()))
    for request in lengths_forced([20, 20, 20, 20, 5, 5]):
        decoder.submit(request)
    ended = []
    with torch.no_grad():
        for i, responses in enumerate(decoder.run()):
            ended += [each.number for each in responses]
            if i == 3:
                decoder.drop_group(0)
                assert rows.freed == [0]
                decoder.drop_group(1)
                assert rows.freed == [0, 1]
    assert ended == [4, 5]
    assert decoder.steps == 3 + 4


class Versions:
    """Weights that change before some forward passes, and their version."""

    def __init__(self, model, change_at: tuple[int, ...]) -> None:
        self.model, self.change_at, self.calls, self.version = model, change_at, 0, 0

    def apply(self) -> int:
        self.calls += 1
        if self.calls in self.change_at:
            self.version += 1
            with torch.no_grad():
                self.model.model.norm.weight.mul_(0.9)
                self.model.model.layers[0].self_attn.q_norm.weight.mul_(1.2)
        return self.version


@pytest.mark.parametrize("make", [LeanRows, lambda *these: DistinctRows(LeanRows(*these))], ids=["lean", "distinct"])
def test_a_prompt_is_prefilled_again_for_responses_that_get_a_slot_after_an_update(make: Callable):
    model = model_of("Qwen3")
    versions = Versions(model, (4, 9))
    decoder = Decoder(make(model, CPU), 2, CPU, settings(()), apply_new_weights=versions.apply)
    prompt, limits = (5, 6, 7, 8), [6, 3, 5, 4, 7]
    for i, limit in enumerate(limits):
        decoder.submit(Request(prompt, 50 + i, limit))
    found = run(decoder)
    after = {0: model_of("Qwen3")}
    for version in (1, 2):
        after[version] = model_of("Qwen3")
        again = Versions(after[version], tuple(range(1, version + 1)))
        for _ in range(version):
            again.apply()
    seen = [each.per_token["versions"].tolist() for each in found]
    assert all(each == sorted(each) for each in seen)
    assert len({each[0] for each in seen}) > 1, "some began with new weights"
    assert any(len(set(each)) > 1 for each in seen), "the weights changed while some grew"
    for each, own in zip(found, seen, strict=True):
        tokens = each.per_token["tokens"].tolist()
        constant = own.count(own[0])  # later tokens attend to keys of older weights
        logprobs = {}
        for version, changed in after.items():
            with torch.no_grad():
                logits = changed(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits
            logprobs[version] = (logits[0, len(prompt) - 1 : -1] / 1.3).log_softmax(-1)[range(len(tokens)), tokens]
        assert_values_close(torch.from_numpy(each.per_token["logprobs"][:constant]), logprobs[own[0]][:constant])
        others = [values[0] for version, values in logprobs.items() if version != own[0]]
        assert all(abs(float(value - logprobs[own[0]][0])) > 1e-3 for value in others), "the weights differ enough"


def test_weights_are_exchanged_before_a_prefill_and_before_a_step_and_nowhere_else():
    model = model_of("Qwen3")
    versions = Versions(model, (1, 4))
    decoder = Decoder(LeanRows(model, CPU), 1, CPU, settings(()), apply_new_weights=versions.apply)
    for group in range(2):
        decoder.submit(Request((5, 6 + group), 50 + group, 3, 0, group))
    assert [each.per_token["versions"].tolist() for each in run(decoder)] == [[1, 1, 1], [2, 2, 2]]
    assert versions.calls == 6


def test_equal_responses_with_other_limits_are_decoded_once_up_to_the_shorter_one(model):
    decoder = Decoder(DistinctRows(LeanRows(model, CPU)), 2, CPU, settings(()))
    for limit in (3, 12):
        decoder.submit(Request((5, 6, 7), 11, limit))
    short, long = (each.per_token["tokens"].tolist() for each in run(decoder))
    alone_again = Decoder(LeanRows(model, CPU), 1, CPU, settings(()))
    alone_again.submit(Request((5, 6, 7), 11, 12))
    (expected,) = run(alone_again)
    assert (len(short), short, long) == (3, long[:3], expected.per_token["tokens"].tolist())


def test_a_slot_grows_no_further_than_its_own_limit(model, monkeypatch):
    monkeypatch.setattr(shared_prefix_attention, "FIRST_CAPACITY", 4)
    rows = LeanRows(model, CPU)
    decoder = Decoder(rows, 3, CPU, settings(()), sync_every=5)
    for request in lengths_forced([2, 9, 3, 4, 4, 6]):
        decoder.submit(request)
    capacities = []
    plain = rows._cache.advance

    def advance() -> bool:
        moved = plain()
        cache = rows._cache
        assert (cache._length <= cache._most).all()
        assert cache._filled.tolist() == cache._length.tolist()
        capacities.append(cache.capacity)
        return moved

    monkeypatch.setattr(rows._cache, "advance", advance)
    run(decoder)
    assert sorted(set(capacities)) == [4, 8], "the longest response appends 8 tokens"


@pytest.mark.parametrize("fixed", [False, True])
def test_a_slot_that_stays_free_does_not_grow_while_others_are_refilled(model, fixed):
    seen: list[list[int]] = []

    class Rows(LeanRows):
        compact_below = 0.0  # as for few recorded rows

        def step(self, token_B: torch.Tensor) -> torch.Tensor:
            logits = super().step(token_B)
            seen.append(self._cache._length.tolist())
            return logits

    rows = Rows(model, CPU, fixed)
    limits = [60] * 4 + [3] * 12  # no more than two prompts are held: after the first six, one slot stays free
    decoder = Decoder(rows, 6, CPU, settings(()), prompts=2)
    for i, limit in enumerate(limits):
        decoder.submit(Request((5,) if i < 5 else (6, i), 70 + i, limit, 0, i))
    found = run(decoder)
    assert sorted(len(each.per_token["tokens"]) for each in found) == sorted(limits)
    assert max(max(lengths[4:], default=0) for lengths in seen) <= 3


def test_rows_of_equal_lengths_are_read_without_a_mask_and_others_with_one(model, monkeypatch):
    rows = LeanRows(model, CPU)
    masked, plain = [], rows._cache.places

    def places():
        found = plain()
        masked.append(found.bias is not None)
        return found

    monkeypatch.setattr(rows._cache, "places", places)
    decoder = Decoder(rows, 2, CPU, settings(()))
    for request in lengths_forced([6, 4, 4]):
        decoder.submit(request)
    run(decoder)
    assert masked == [False] * 3 + [True] * 2 + [False]


def test_a_refilled_slot_needs_no_further_recording(model):
    recorder = Recorder()
    decoder = Decoder(
        RecordedRows(LeanRows(model, CPU, fixed=True), recorder, worth_recording=1), 4, CPU, settings(()), sync_every=2
    )
    submitted = [
        Request((5 + group,) * (1 + group % 3), 8 * group + sample, 3 + (5 * group + 3 * sample) % 11, 0, group)
        for group in range(10)
        for sample in range(2)
    ]
    for request in submitted:
        decoder.submit(request)
    found = run(decoder)
    # one at the start, and where a wider prompt, more prompts or a mask came for the first time
    assert len(recorder.made) <= 5 < len(submitted) - 4, "slots were refilled"
    assert sum(each.replays for each in recorder.made) == decoder.steps
    replays = [each.replays for each in recorder.made]
    assert replays[-1] > decoder.steps / 2
    plain = Decoder(LeanRows(model, CPU), 64, CPU, settings(()))
    for request in submitted:
        plain.submit(request)
    assert [each.per_token["tokens"].tolist() for each in found] == [
        each.per_token["tokens"].tolist() for each in run(plain)
    ]


@pytest.mark.parametrize("fixed", [False, True], ids=["plain", "fixed"])
def test_a_parked_response_goes_on_in_another_row_with_tokens_that_were_observed(model, monkeypatch, fixed):
    monkeypatch.setattr(shared_prefix_attention, "FIRST_CAPACITY", 4)
    rows, prompts = LeanRows(model, CPU, fixed=fixed), ([5, 6, 7, 8], [9, 10])
    sampled, observed = [20, 21, 22, 23, 24, 25], [30, 31, 32, 33, 34]
    with torch.no_grad():
        first, second = rows.prefill(prompts)[0]
        rows.arrange(~np.array([second, first]), np.array([3, 6]))
        for token in sampled:
            rows.step(torch.tensor([1, token]))
        parked = rows.park(1, 4 + len(sampled))
        rows.arrange(~np.array([second, second]), np.array([3, 3]))
        for token in (2, 3):
            rows.step(torch.tensor([token, token]))
        (longer,), last = rows.extend([parked], [[*prompts[0], *sampled, *observed[:2]]])
        rows.arrange(np.array([~longer, 0, 1]), np.array([5, 5, 5]))
        steps = [rows.step(torch.tensor([token, 4, 4])).clone()[:1] for token in observed[2:]]
        logits = torch.cat([last, *steps])
        whole = model(input_ids=torch.tensor([[*prompts[0], *sampled, *observed]]), use_cache=False).logits[0]
    assert_values_close(logits, whole[1 - len(observed) :])


def test_the_models_own_rows_wait_for_all_responses_of_a_part(model):
    decoder = Decoder(ModelRows(model, CPU), 2, CPU, settings(()))
    for request in lengths_forced([6, 4, 5, 2]):
        decoder.submit(request)
    assert [len(each.per_token["tokens"]) for each in run(decoder)] == [6, 4, 5, 2]
    assert decoder.steps == 5 + 4
