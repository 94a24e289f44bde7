"""The lean step with the compiled ops of a decode step, which the CPU has, and where it does without."""

from typing import Any

import pytest
import torch
from hwgrpo_kernels import decode_compiled, default_registry

from hwgrpo.rollout.local import kernel_fallback, shared_prefix_attention
from hwgrpo.values import Sampling
from tests.rollout.decoders import CPU, EXTRA, batch_of, engine_of, model_of
from tests.rollout.local.test_kernel_fallback import NOTE, logits_of, notes_of, tokens_of
from tests.support.numbers.rounding import assert_values_close

PINS: dict[str, str] = {"decode_attention": "compiled"}


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix_attention, "FIRST_CAPACITY", 4)
    monkeypatch.setattr("hwgrpo.rollout.local.engine.describe_drift", lambda *_: None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiled ops that were called, in order."""
    called: list[str] = []

    def count(name: str) -> None:
        real = getattr(decode_compiled, name)
        monkeypatch.setattr(decode_compiled, name, lambda *arguments: called.append(name) or real(*arguments))

    for name in ("decode_attention", "rms_norm"):
        count(name)
    return called


@pytest.mark.parametrize("family", EXTRA)
def test_logits_are_those_of_torch_s_operations(family, calls):
    model = model_of(family)
    with torch.no_grad():
        expected = [each.clone() for each in logits_of(model, fixed=False)]
        assert not calls
        with default_registry.pinned(PINS):
            for one, other in zip(logits_of(model, fixed=False), expected, strict=True):
                assert_values_close(one, other)
    assert calls.count("decode_attention") == 3 * len(expected)
    of_all_heads = 2 if family == "Olmo2" else 0  # a norm of queries and one of keys
    assert calls.count("rms_norm") == (3 * (2 + of_all_heads) + 1) * len(expected)


@pytest.mark.parametrize("slots", [4, 64], ids=["refilled", "at once"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma"])
def test_a_run_has_the_tokens_of_torch_s_operations(family, slots, calls):
    model, sampling = model_of(family), Sampling(4, 30, seed=2, temperature=0.7)
    expected = engine_of(model, max_sequences=slots).generate(batch_of(), sampling)
    assert not calls
    with default_registry.pinned(PINS):
        engine = engine_of(model, max_sequences=slots)
        calls.clear()
        found = engine.generate(batch_of(), sampling)
    assert calls.count("decode_attention") >= 3 * 29
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert_values_close(found.logprobs, expected.logprobs)
    assert (engine.decode_path, notes_of(engine)) == ("lean", [])


def test_in_half_precision_the_startup_check_passes(calls):
    with default_registry.pinned(PINS):
        engine = engine_of(model_of("Qwen3").to(torch.bfloat16), compute_dtype=torch.bfloat16)
        assert calls, "the check has run with them"
        calls.clear()
        tokens_of(engine)
    assert calls
    assert notes_of(engine) == []


def test_a_model_is_decoded_by_them_from_some_number_of_parameters_on(calls, monkeypatch):
    model = model_of("Qwen3")
    parameters = sum(each.numel() for each in model.model.parameters())
    monkeypatch.setattr(kernel_fallback, "LEAST_COMPILED", parameters + 1)
    monkeypatch.setattr(decode_compiled, "_library", None)  # a call would fail: nothing is compiled
    small = engine_of(model)
    expected = tokens_of(small)
    assert (small._kernels.active, notes_of(small)) == (False, [])
    monkeypatch.undo()
    monkeypatch.setattr("hwgrpo.rollout.local.engine.describe_drift", lambda *_: None)
    monkeypatch.setattr(kernel_fallback, "LEAST_COMPILED", parameters)
    large = engine_of(model)
    assert large._kernels.active
    kernels = kernel_fallback.step_kernels(model, CPU)
    assert kernels is not None
    assert (kernels.attention, kernels.norm) == (decode_compiled.decode_attention, decode_compiled.rms_norm)
    assert tokens_of(large) == expected
    with default_registry.pinned({"decode_attention": "torch"}):
        assert not engine_of(model)._kernels.active


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("false", "failed to load: false "), ("no-such-compiler", "needs a C++ compiler, but CXX='no-such-compiler' ")],
)
def test_where_nothing_can_be_compiled_torch_s_operations_decode_and_a_note_says_so(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    model = model_of("Qwen2")
    expected = tokens_of(engine_of(model))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("HWGRPO_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_fallback, "LEAST_COMPILED", 0)
    decode_compiled._library.cache_clear()
    try:
        engine = engine_of(model)
        assert tokens_of(engine) == expected
        [note] = notes_of(engine)
        assert note.startswith(NOTE + reason)
        with default_registry.pinned({"decode_attention": "torch"}):
            assert notes_of(engine_of(model)) == []
        with default_registry.restored():
            default_registry.configure(strict=True)  # concerns the backend's preference, torch
            if compiler == "no-such-compiler":
                assert tokens_of(engine_of(model)) == expected
        with default_registry.pinned(PINS), pytest.raises(ValueError, match="decode_attention=compiled cannot run"):
            engine_of(model)
    finally:
        decode_compiled._library.cache_clear()


def test_a_compiled_op_that_is_wrong_is_not_used(monkeypatch):
    model = model_of("Qwen2")
    expected = tokens_of(engine_of(model))
    real = decode_compiled.decode_attention
    monkeypatch.setattr(decode_compiled, "decode_attention", lambda *arguments: real(*arguments) * 2)
    with default_registry.pinned(PINS):
        engine = engine_of(model)
        assert tokens_of(engine) == expected
    [note] = notes_of(engine)
    assert note.startswith(NOTE + "its logits would differ by ")
