"""The lean step recorded as a device graph, replayed by a double that keeps to a graph's rules; see `recorder.py`."""

import dataclasses
import weakref
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from hwgrpo_backends import registry
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hwgrpo.errors import RunError
from hwgrpo.rollout.local import decode_graph, shared_prefix_attention
from hwgrpo.rollout.local.decode_graph import RecordedRows
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.training.shared_setup import build_engine
from hwgrpo.values import Sampling
from tests.rollout.decoders import (
    CPU,
    EXTRA,
    PROMPTS,
    TOKENIZER,
    assert_equal,
    batch_of,
    begin,
    both_ways,
    engine_of,
    model_of,
    sync_every,
)
from tests.support.devices.recorder import Recorder, ReplayedOnCpu
from tests.support.models.tiny import settings
from tests.support.numbers.rounding import assert_values_close

UNEVEN = ([0, 0, 1, 1, 2, 2], (3, [0, 1, 3, 4]), (3, [1, 2, 3]), (2, [2]), (1, None))
EQUAL = ([5, 6, 7], [8, 9, 10], [11, 12, 13])


def recorded_rows(recorder: Recorder):
    def make(model):
        return RecordedRows(LeanRows(model, CPU, fixed=True), recorder)

    return make


@pytest.mark.parametrize("family", EXTRA)
@pytest.mark.parametrize("prompts", [PROMPTS, EQUAL], ids=["unequal", "equal"])
def test_a_replayed_step_gives_the_logits_of_the_models_own_forward(family, prompts):
    recorder = Recorder()
    assert_equal(both_ways(model_of(family), prompts, UNEVEN, make=recorded_rows(recorder)))
    assert [recording.replays for recording in recorder.made] == [3, 3, 2, 1]


def test_buffers_grow_between_recordings():
    first = shared_prefix_attention.FIRST_CAPACITY
    recorder = Recorder()
    schedule = ([0, 0, 2], (first - 1, [0, 2]), (first + 20, None))
    longest = 2 * first + 30
    assert_equal(both_ways(model_of("Llama"), PROMPTS, schedule, longest, recorded_rows(recorder)))
    assert [recording.replays for recording in recorder.made] == [first - 1, 1, first, 19]


def test_memory_of_a_recording_is_given_back_before_the_next_is_made():
    held = []

    class Counting(Recorder):
        def __call__(self, work):
            held.append(sum(recording.output is not None for recording in self.made))
            return super().__call__(work)

    both_ways(model_of("Llama"), PROMPTS, UNEVEN, make=recorded_rows(Counting()))
    assert held == [0, 0, 0, 0]


def test_the_last_few_steps_are_not_worth_a_recording():
    for steps, made in ((decode_graph.WORTH_RECORDING, 1), (decode_graph.WORTH_RECORDING - 1, 0)):
        recorder = Recorder()
        assert_equal(both_ways(model_of("Llama"), PROMPTS, ([0, 1], (3, None)), steps, recorded_rows(recorder)))
        assert len(recorder.made) == made


@pytest.mark.parametrize("steps", [1, 8])
def test_the_engine_samples_the_same_with_and_without_recordings(steps, monkeypatch):
    sync_every(steps, monkeypatch)
    model, recorder = model_of("Qwen3"), Recorder()
    sampling = Sampling(24, 90, seed=3, temperature=1.3, stop_token_ids=tuple(range(0, len(TOKENIZER), 30)))
    plain, graphs = engine_of(model, max_sequences=128), engine_of(model, max_sequences=128, recorder=recorder)
    assert (plain.decode_path, graphs.decode_path, graphs.notes) == ("lean", "graph", ())
    trial = len(recorder.made)
    expected, found = plain.generate(batch_of(), sampling), graphs.generate(batch_of(), sampling)
    assert expected.lengths.min() < 10 < 64 < expected.lengths.max()
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.offsets, expected.offsets)
    assert_values_close(found.logprobs, expected.logprobs)
    # of 72 rows; then of half and of a quarter of them; then the buffers are doubled
    assert 2 <= len(recorder.made) - trial <= 4
    assert sum(recording.replays for recording in recorder.made[trial:]) >= 64


def test_tokens_that_were_given_stay_as_they_were():
    rows = RecordedRows(LeanRows(model_of("Llama"), CPU, fixed=True), Recorder())
    first, second = torch.tensor([4, 5]), torch.tensor([6, 7])
    with torch.no_grad():
        begin(rows, PROMPTS, [0, 1])
        rows.step(first)
        rows.step(second)
    assert (first.tolist(), second.tolist()) == ([4, 5], [6, 7])


def test_few_rows_are_decoded_together_to_the_end():
    rows = RecordedRows(LeanRows(model_of("Llama"), CPU, fixed=True), Recorder())
    shares = []
    for count in (decode_graph.FEW_ROWS + 1, decode_graph.FEW_ROWS):
        with torch.no_grad():
            begin(rows, PROMPTS, [0] * count)
        shares.append(rows.compact_below)
    assert shares == [0.5, 0.0]


def _refused(work):
    try:
        raise RuntimeError("operation not permitted when stream is capturing\nfurther lines")
    finally:
        raise RuntimeError("previous error during capture")


def test_a_device_that_cannot_record_stops_the_start_with_the_cause_and_the_setting():
    with pytest.raises(RunError, match=r"failed \(operation not permitted .* capturing\): set rollout.graphs=false"):
        engine_of(model_of("Qwen2"), recorder=_refused)


def test_a_device_that_cannot_record_decodes_without_graphs_where_they_were_not_asked_for():
    model, greedy = model_of("Qwen2"), Sampling(1, 20, greedy=True)
    engine = engine_of(model, recorder=_refused, graphs_required=False)
    (note,) = engine.notes
    assert note.startswith("rollout decodes without device graphs: recording the decode step of 3 rows")
    assert "failed (operation not permitted when stream is capturing): set rollout.graphs=false" in note
    assert engine.decode_path == "lean"
    assert engine.generate(batch_of(), greedy).texts == engine_of(model).generate(batch_of(), greedy).texts


class _FullAfter:
    """A recorder for whose recording number `after` there is no memory, once its work has run."""

    def __init__(self, after: int) -> None:
        self.recorder, self.after, self.asked = Recorder(), after, 0

    def __call__(self, work):
        self.asked += 1
        if self.asked > self.after:
            work()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return self.recorder(work)


def test_memory_that_runs_out_in_a_recording_stops_the_run_and_names_what_to_lower():
    engine = engine_of(model_of("Qwen2"), recorder=_FullAfter(2))
    with pytest.raises(RunError, match=r"of 24 rows .*\(CUDA out of memory.*lower rollout.max_sequences"):
        engine.generate(batch_of(), Sampling(8, 40))


@pytest.mark.parametrize("recorded", [0, 1], ids=["the first", "a later one"])
def test_a_recording_that_fails_later_leaves_the_responses_as_they_are_without_graphs(recorded, capsys):
    model, full = model_of("Qwen3"), _FullAfter(2 + recorded)  # the self-test makes two
    sampling = Sampling(24, 90, seed=3, temperature=1.3, stop_token_ids=tuple(range(0, len(TOKENIZER), 30)))
    engine = engine_of(model, max_sequences=128, recorder=full, graphs_required=False)
    assert (engine.decode_path, engine.notes) == ("graph", ())
    expected = engine_of(model, max_sequences=128).generate(batch_of(), sampling)
    for _ in range(2):
        found = engine.generate(batch_of(), sampling)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.offsets, expected.offsets)
        assert_values_close(found.logprobs, expected.logprobs)
        assert engine.decode_path == "lean"
    assert full.asked == 3 + recorded, "none is made after one failed"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hwgrpo: rollout decodes without device graphs: recording the decode step of ")
    assert "(CUDA out of memory. Tried to allocate 2 GiB)" in line


def test_a_failed_recording_holds_no_tensors_when_its_step_is_computed():
    held = []

    def full(work):
        logits = work()
        held.append(weakref.ref(logits))
        raise torch.OutOfMemoryError("CUDA out of memory")

    alive = []
    rows = RecordedRows(
        LeanRows(model_of("Llama"), CPU, fixed=True), full, on_failure=lambda reason: alive.append(held[0]())
    )
    with torch.no_grad():
        begin(rows, PROMPTS, [0, 1])
        rows.step(torch.tensor([4, 5]))
    assert alive == [None]


class _Stuck(ReplayedOnCpu):
    def replay(self):
        if self.replays == 0:
            super().replay()


def test_a_device_whose_replays_fail_the_trial_decodes_without_them():
    model = model_of("Qwen2")
    engine = engine_of(model, recorder=_Stuck)
    (note,) = engine.notes
    assert note.startswith("rollout decodes without device graphs: its logits would differ by")
    assert engine.decode_path == "lean"
    greedy = Sampling(1, 20, greedy=True)
    assert engine.generate(batch_of(), greedy).texts == engine_of(model).generate(batch_of(), greedy).texts


def test_a_model_that_the_lean_step_does_not_know_is_not_recorded():
    model = model_of("Llama")
    model.model.layers[0].register_forward_hook(lambda *_: None)
    recorder = Recorder()
    engine = engine_of(model, recorder=recorder)
    assert (engine.decode_path, len(engine.notes), recorder.made) == ("model", 1, [])


@pytest.mark.parametrize(
    ("words", "paths"),
    [
        (["rollout.graphs=true"], ("graph", "graph")),
        (["rollout.graphs=false"], ("lean", "lean")),
        ([], ("lean", "graph")),
        (["trainer.deterministic=true"], ("lean", "lean")),
        (["trainer.deterministic=true", "rollout.graphs=false"], ("lean", "lean")),
    ],
    ids=["wanted", "not wanted", "automatic", "deterministic", "deterministic and not wanted"],
)
def test_the_settings_and_the_backend_say_whether_the_devices_recorder_is_used(words, paths):
    for by_default, path in zip((False, True), paths, strict=True):
        engine = built(words, Recorder(), by_default)
        assert engine.decode_path == path
        assert engine.notes == ()


def built(words: list[str], recorder: Any, graphs_by_default: bool) -> Any:
    policy = SimpleNamespace(model=model_of("Llama"), compute_dtype=torch.float32, images=None)
    backend = dataclasses.replace(registry.get("cpu"), graphs_by_default=graphs_by_default)
    return build_engine(
        settings(*words), policy, TOKENIZER, SimpleNamespace(torch_device=CPU, recorder=recorder, backend=backend)
    )


def test_only_graphs_that_the_settings_ask_for_must_be_recorded():
    with pytest.raises(RunError, match=r"set rollout\.graphs=false"):
        built(["rollout.graphs=true"], _refused, True)
    engine = built([], _refused, True)
    assert (engine.decode_path, len(engine.notes)) == ("lean", 1)


class _OnDevice(TorchDispatchMode):
    """Refuses tensors of the host, as work that is recorded must not touch them; meta itself refuses to wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_flatten((args, kwargs, result))[0]:
            assert not isinstance(leaf, torch.Tensor) or leaf.is_meta, f"{func} touches a tensor of the host"
        return result


def _moved(holder: Any) -> None:
    for name, value in vars(holder).items():
        if isinstance(value, torch.Tensor):
            setattr(holder, name, value.to("meta"))
        elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            setattr(holder, name, [each.to("meta") for each in value])


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", EXTRA)
def test_a_step_touches_no_tensor_of_the_host_and_waits_for_nothing(family, adapted):
    model = model_of(family)
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        rows = LeanRows(model, CPU, fixed=True)
        begin(rows, PROMPTS, [0, 0, 1, 2])
        rows.advance()
        on_meta = LeanRows(model.to("meta"), torch.device("meta"), fixed=True)
        on_meta._cos, on_meta._sin, on_meta._cache = rows._cos, rows._sin, rows._cache
        _moved(on_meta)
        _moved(on_meta._cache)
        token = torch.zeros(4, dtype=torch.long, device="meta")
        with _OnDevice():
            assert on_meta.compute(token).shape == (4, len(TOKENIZER))


def test_the_double_notices_what_a_graph_would_not_hold():
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="stream is capturing"):
        ReplayedOnCpu(lambda: x * float(x.sum()))

    factor = 2.0
    recording = ReplayedOnCpu(lambda: (x * factor).view(3, 1) + 1)
    factor = 3.0
    x.fill_(5.0)
    assert recording.output.isnan().all()
    recording.replay()
    assert recording.output.tolist() == [[11.0], [11.0], [11.0]]

    holder = SimpleNamespace(tensor=torch.ones(3))
    recording = ReplayedOnCpu(lambda: holder.tensor + 1)
    holder.tensor = torch.zeros(3)
    with pytest.raises(AssertionError, match="a tensor that is gone"):
        recording.replay()

    recording.release()
    with pytest.raises(AssertionError, match="released"):
        recording.replay()
