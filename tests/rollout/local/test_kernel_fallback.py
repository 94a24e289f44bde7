"""The lean step with the kernels of a decode step, whose definitions stand for them here, and the fallback without."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hwgrpo.errors import RunError
from hwgrpo.rollout.local import shared_prefix_attention
from hwgrpo.rollout.local.decode_graph import RecordedRows
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.values import Sampling
from tests.rollout.decoders import CPU, EXTRA, PROMPTS, batch_of, engine_of, model_of
from tests.support.devices.recorder import Recorder
from tests.support.numbers.decode_kernels_on_cpu import DEFINITIONS, selected
from tests.support.numbers.rounding import assert_values_close

SAMPLING = Sampling(2, 30, seed=2, temperature=0.7)
NOTE = "rollout decodes by torch's operations without the kernels of a decode step: "


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix_attention, "FIRST_CAPACITY", 4)
    monkeypatch.setattr("hwgrpo.rollout.local.engine.describe_drift", lambda *_: None)


def tokens_of(engine: Any) -> list[int]:
    return engine.generate(batch_of(), SAMPLING).tokens.tolist()


def notes_of(engine: Any) -> list[str]:
    return [note for note in engine.notes if "kernels" in note or "graphs" in note]


def logits_of(model: Any, fixed: bool) -> Iterator[torch.Tensor]:
    """Yield the logits of rows that reach their limits, begin anew in their places, are moved and dropped."""
    rows = LeanRows(model, CPU, fixed=fixed)
    token = torch.tensor
    first, second, third = rows.prefill(PROMPTS)[0]
    rows.arrange(~np.array([second, first, first, third]), np.array([2, 9, 6, 9]))
    for step in range(5):  # the first row overwrites its second token
        yield rows.step(token([7, 8, 9, 10]) + step)
    rows.arrange(np.array([~third, 1, 2, ~second]), np.array([3, 4, 1, 12]))
    for step in range(6):
        yield rows.step(token([17, 18, 19, 20]) + step)
    [fourth] = rows.prefill([[5, 4, 3, 2, 6, 7, 8, 9, 10, 3, 4, 5]])[0]  # longer than all before
    rows.free([second])
    rows.arrange(np.array([3, ~fourth, 0]), np.array([6, 6, 1]))
    for step in range(6):
        yield rows.step(token([3, 4, 5]) + step)


@pytest.mark.parametrize("fixed", [False, True], ids=["plain", "fixed"])
@pytest.mark.parametrize("family", EXTRA)
def test_logits_are_those_of_torch_s_operations(family, fixed):
    model = model_of(family)
    with torch.no_grad():
        expected = [each.clone() for each in logits_of(model, fixed)]
        with selected() as calls:
            for one, other in zip(logits_of(model, fixed), expected, strict=True):
                assert_values_close(one, other)
    assert calls["decode_attention"] == 3 * len(expected)
    assert calls["swiglu"] == (0 if family == "Gemma" else calls["decode_attention"])  # its gate is GELU


@pytest.mark.parametrize(("recorder", "path"), [(None, "lean"), (Recorder(), "graph")], ids=["plain", "recorded"])
def test_a_run_has_the_tokens_of_torch_s_operations(recorder, path):
    model = model_of("Qwen2")
    expected = tokens_of(engine_of(model, max_sequences=4))
    with selected() as calls:
        engine = engine_of(model, max_sequences=4, recorder=recorder)
        before = calls["decode_attention"]
        assert tokens_of(engine) == expected
    assert calls["decode_attention"] > before
    assert (engine.decode_path, notes_of(engine)) == (path, [])


def test_one_recording_lasts_until_rows_are_dropped_whatever_the_capacity():
    def recordings(model: Any) -> list[int]:
        recorder = Recorder()
        rows = RecordedRows(LeanRows(model, CPU, fixed=True), recorder, worth_recording=1)
        numbers, _ = rows.prefill(PROMPTS)
        rows.arrange(~np.array(numbers), np.array([20, 9, 20]))
        for step in range(12):
            rows.step(torch.tensor([5, 6, 7]) + step)
        # a row that begins anew, and one that has ended and may go a token on
        rows.arrange(np.array([0, 1, ~numbers[0]]), np.array([8, 1, 20]))
        for step in range(8):
            rows.step(torch.tensor([5, 6, 7]) + step)
        rows.arrange(np.array([0, 2]), np.array([1, 12]))
        for step in range(3):
            rows.step(torch.tensor([5, 6]) + step)
        return [each.replays for each in recorder.made]

    model = model_of("Qwen2")
    with torch.no_grad():
        doubling = recordings(model)
        with selected():
            assert recordings(model) == [20, 3]
    assert len(doubling) > 2


def test_buffers_have_room_for_full_responses_at_once_and_no_more_than_the_plan_counts(monkeypatch):
    capacities, advance = set(), LeanRows.advance

    def watched(rows: LeanRows) -> bool:
        moved = advance(rows)
        capacities.add(rows._cache.capacity)
        return moved

    with selected():
        engine = engine_of(model_of("Qwen2"), max_sequences=4, recorder=Recorder())
        monkeypatch.setattr(LeanRows, "advance", watched)
        tokens_of(engine)
    assert capacities == {SAMPLING.max_response_tokens}


def failing(*_: Any) -> Any:
    raise MemoryError("out of resources: shared memory")


def doubled(*arguments: Any) -> torch.Tensor:
    return DEFINITIONS["decode_attention"](*arguments) * 2


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [(failing, "they fail (MemoryError: out of resources: shared memory)"), (doubled, "its logits would differ by ")],
)
@pytest.mark.parametrize("recorder", [None, Recorder()], ids=["plain", "recorded"])
def test_a_kernel_that_fails_or_is_wrong_is_not_used_and_a_note_says_so(kernel, reason, recorder):
    model = model_of("Qwen2")
    expected = tokens_of(engine_of(model, recorder=recorder))
    with selected({**DEFINITIONS, "decode_attention": kernel}) as calls:
        engine = engine_of(model, recorder=recorder)
        before = dict(calls)
        assert tokens_of(engine) == expected
        assert calls == before
    [note] = notes_of(engine)
    assert note.startswith(NOTE + reason)
    assert engine.decode_path == ("lean" if recorder is None else "graph")


class UnlikeRecorder(Recorder):
    """Records a kernel as another one than runs: its first call of a recording, which warms up, is right."""

    recording = False

    def __call__(self, work: Any) -> Any:
        self.recording = True
        try:
            return super().__call__(work)
        finally:
            self.recording = False


@pytest.mark.parametrize("required", [True, False])
def test_a_kernel_that_only_a_graph_gets_wrong_is_not_used_and_graphs_are(required):
    model, recorder = model_of("Qwen2"), UnlikeRecorder()
    expected = tokens_of(engine_of(model))

    def unlike(*arguments: Any) -> torch.Tensor:
        return (doubled if recorder.recording else DEFINITIONS["decode_attention"])(*arguments)

    with selected({**DEFINITIONS, "decode_attention": unlike}):
        engine = engine_of(model, recorder=recorder, graphs_required=required)
        assert tokens_of(engine) == expected
    [note] = notes_of(engine)
    assert note.startswith(NOTE + "recorded as a device graph, its logits would differ by ")
    assert engine.decode_path == "graph"


def test_where_no_recording_works_the_kernels_stay_and_graphs_go():
    def recorder(work: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = model_of("Qwen2")
    expected = tokens_of(engine_of(model))
    with selected() as calls:
        engine = engine_of(model, recorder=recorder, graphs_required=False)
        before = calls["decode_attention"]
        assert tokens_of(engine) == expected
        assert calls["decode_attention"] > before
        [note] = notes_of(engine)
        assert note.startswith("rollout decodes without device graphs: ")
        with pytest.raises(RunError, match="not permitted"):
            engine_of(model, recorder=recorder)


def test_on_a_cpu_nothing_is_selected():
    engine = engine_of(model_of("Qwen2"))
    assert not engine._kernels.active
    assert notes_of(engine) == []
