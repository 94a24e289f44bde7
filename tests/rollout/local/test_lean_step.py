"""The lean decode step against the model's own forward, on tiny random models, and what keeps it away from others."""

import dataclasses

import pytest
import torch
import transformers
from torch import nn

from hwgrpo.errors import RunError
from hwgrpo.rollout.local import architectures, shared_prefix_attention
from hwgrpo.rollout.local.architectures import ARCHITECTURES, unsupported_reason
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.rollout.local.lean_step_check import check_lean_step
from hwgrpo.values import Sampling
from tests.rollout.decoders import (
    CPU,
    EXTRA,
    PROMPTS,
    TOKENIZER,
    assert_equal,
    batch_of,
    both_ways,
    engine_of,
    model_of,
    sync_every,
)
from tests.support.devices.recorder import Recorder
from tests.support.numbers.rounding import assert_values_close


def test_every_architecture_of_the_table_is_tested_here():
    assert {name.rsplit(".", 1)[1].removesuffix("ForCausalLM") for name in ARCHITECTURES} == set(EXTRA)


@pytest.mark.parametrize("family", EXTRA)
def test_logits_are_those_of_the_models_own_forward(family):
    model = model_of(family)
    assert unsupported_reason(model, 100) is None
    assert_equal(both_ways(model, PROMPTS, ([0, 0, 1, 1, 2, 2], (4, None))))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("prompts", [PROMPTS, ([5, 6, 7], [8, 9, 10], [11, 12, 13])], ids=["unequal", "equal"])
def test_rows_may_be_uneven_dropped_and_left_without_a_prompt(prompts, attention):
    schedule = ([0, 1, 1, 1, 2, 2], (2, [0, 1, 3, 4]), (2, [1, 2, 3]), (2, [2]), (1, None))
    assert_equal(both_ways(model_of("Qwen3", attn_implementation=attention), prompts, schedule))


def test_buffers_grow_and_keep_what_they_hold():
    longest = 2 * shared_prefix_attention.FIRST_CAPACITY + 3
    schedule = (
        [0, 0, 2],
        (shared_prefix_attention.FIRST_CAPACITY - 1, [0, 2]),
        (shared_prefix_attention.FIRST_CAPACITY + 4, None),
    )
    assert_equal(both_ways(model_of("Llama"), PROMPTS, schedule, longest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_engine_samples_the_same_by_both_paths(dtype, monkeypatch):
    model, sampling = model_of("Qwen3"), Sampling(4, 30, seed=2, temperature=0.7)
    lean = engine_of(model, compute_dtype=dtype)
    assert (lean.decode_path, lean.decode_reason, lean.notes[:-1]) == ("lean", "", ())
    ours = lean.generate(batch_of(), sampling)
    monkeypatch.setattr("hwgrpo.rollout.local.engine.check_lean_step", lambda *_, **__: "it is disabled")
    own = engine_of(model, compute_dtype=dtype)
    theirs = own.generate(batch_of(), sampling)
    assert (own.decode_path, own.decode_reason) == ("model", "it is disabled")
    assert own.notes[0] == "rollout decodes with the model's own forward: it is disabled"
    if dtype == torch.float32:
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert_values_close(ours.logprobs, theirs.logprobs)
    else:  # rounding differs, so a draw near an edge may; the first tokens come from the same prefill
        assert torch.equal(ours.tokens[ours.offsets[:-1]], theirs.tokens[theirs.offsets[:-1]])


@pytest.mark.parametrize(("recorder", "path"), [(None, "lean"), (Recorder(), "graph")], ids=["plain", "recorded"])
def test_what_an_optimizer_writes_in_place_is_what_samples(recorder, path):
    model = model_of("Gemma")  # its norm weights are read with an offset, which makes a new tensor
    engine, greedy = engine_of(model, recorder=recorder), Sampling(1, 24, greedy=True)
    before = engine.generate(batch_of(), greedy)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    engine.update_weights(1)
    after = engine.generate(batch_of(), greedy)
    assert engine.decode_path == path
    assert after.tokens.tolist() != before.tokens.tolist()
    assert after.tokens.tolist() == engine_of(model).generate(batch_of(), greedy).tokens.tolist()


def test_a_sequence_longer_than_the_sliding_window_is_decoded_by_the_model():
    engine = engine_of(model_of("Mistral", sliding_window=20))
    engine.generate(batch_of(), Sampling(1, 13))
    assert engine.decode_path == "lean"
    engine.generate(batch_of(), Sampling(1, 14))
    assert engine.decode_reason == "a sequence can be 21 tokens long, its attention sees 20"


class Doubled(transformers.LlamaForCausalLM):
    """A subclass: it may do anything."""


def _own_class(model):
    return Doubled(model.config)


def _own_module(model):
    model.model.layers[1].mlp.up_proj = nn.Sequential(nn.Linear(32, 48))


def _hook(model):
    model.model.layers[0].register_forward_hook(lambda *_: None)


def _forward(model):
    model.model.norm.forward = lambda hidden: hidden


def _parameter(model):
    class Special(nn.Parameter):
        pass

    model.lm_head.weight = Special(model.lm_head.weight.detach())


def _rope(model):
    model.config.rope_parameters["rope_type"] = "dynamic"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_own_class, "Doubled is not one of the supported architectures"),
        (_own_module, "model.layers.1.mlp.up_proj is a Sequential"),
        (_hook, "a forward hook is registered on model.layers.0"),
        (_forward, "the forward of model.norm was replaced"),
        (_parameter, "its parameters are Specials"),
        (_rope, "its rotary embedding is of type 'dynamic'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_anything_the_step_does_not_know_is_named_and_left_to_the_model(change, reason):
    model = model_of("Llama")
    model = change(model) or model
    assert unsupported_reason(model, 10) == reason == check_lean_step(model.eval(), CPU)


def test_a_forward_hook_on_all_modules_is_respected():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert unsupported_reason(model_of("Llama"), 10) == "a forward hook is registered on all modules"
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "wrong",
    [{"norm_offset": 1.0}, {"norms_after": True}, {"query_key_norm": "head"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_entry_of_the_table_is_found_out_before_it_samples(wrong, monkeypatch):
    name = "llama.modeling_llama.LlamaForCausalLM"
    monkeypatch.setitem(architectures.ARCHITECTURES, name, dataclasses.replace(ARCHITECTURES[name], **wrong))
    with torch.no_grad():
        reason = check_lean_step(model_of("Llama"), CPU)
    assert reason is not None
    assert reason.startswith(("its logits would differ by", "its layers are not as expected (AttributeError"))


def test_weights_that_are_not_finite_do_not_pass_the_trial():
    model = model_of("Llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
        assert (check_lean_step(model, CPU) or "").startswith("its logits would differ by nan")


def test_metrics_count_response_tokens_and_the_share_of_rows_that_were_alive():
    engine = engine_of(model_of("Qwen2"))
    assert engine.metrics == {}
    completions = engine.generate(batch_of(), Sampling(2, 10))
    assert set(engine.metrics) == {"perf/rollout_tokens_per_second", "perf/rollout_live_rows"}
    assert engine.metrics["perf/rollout_tokens_per_second"] > 0
    assert completions.lengths.tolist() == [10] * 6
    assert engine.metrics["perf/rollout_live_rows"] == 1.0
    stops = tuple(range(0, len(TOKENIZER), 12))
    stopped = engine.generate(batch_of(), Sampling(8, 10, stop_token_ids=stops))
    assert stopped.lengths.min() < stopped.lengths.max()
    assert 0.3 < engine.metrics["perf/rollout_live_rows"] < 1.0


@pytest.mark.parametrize(
    ("features", "slow"), [("avx2 avx512f", True), ("avx512_bf16", False), ("amx_bf16", False), ("sve bf16", False)]
)
def test_bfloat16_without_instructions_for_it_is_told(features, slow, tmp_path, monkeypatch):
    monkeypatch.setattr(architectures, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : fpu {features}\n")
    notes = engine_of(model_of("Llama"), compute_dtype=torch.bfloat16).notes
    assert [("rollout.dtype=float32" in note) for note in notes] == [True] * slow
    assert engine_of(model_of("Llama")).notes == ()


def test_nothing_is_said_of_bfloat16_where_the_features_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(architectures, "CPUINFO", tmp_path / "missing")
    assert architectures.slow_dtype(CPU, torch.bfloat16) is None


@pytest.mark.parametrize("path", ["lean", "model"])
@pytest.mark.parametrize("stop", [(), ("ab", "b", "1")], ids=["tokens", "strings"])
def test_how_often_the_host_looks_changes_no_response(path, stop, monkeypatch):
    if path == "model":
        monkeypatch.setattr("hwgrpo.rollout.local.engine.check_lean_step", lambda *_, **__: "it is disabled")
    engine = engine_of(model_of("Qwen3"), max_sequences=9)
    sampling = Sampling(8, 23, stop=stop, stop_token_ids=tuple(range(0, len(TOKENIZER), 9)), temperature=1.5)
    expected = engine.generate(batch_of(), sampling)
    assert expected.lengths.min() < 5 < expected.lengths.max()
    for steps in (2, 8, 100):
        sync_every(steps, monkeypatch)
        found = engine.generate(batch_of(), sampling)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.offsets, expected.offsets)
        assert torch.equal(found.finished, expected.finished)
        assert found.texts == expected.texts
        assert_values_close(found.logprobs, expected.logprobs)


def test_logits_that_are_not_finite_are_told_by_their_position_however_late_the_host_looks(monkeypatch):
    engine = engine_of(model_of("Llama"))
    step = LeanRows.step
    taken = []

    def breaks(self, token):
        taken.append(token)
        return step(self, token) * (float("nan") if len(taken) == 3 else 1.0)

    monkeypatch.setattr(LeanRows, "step", breaks)
    for steps in (1, 5):
        taken.clear()
        sync_every(steps, monkeypatch)
        with pytest.raises(RunError, match="response position 3 are not finite"):
            engine.generate(batch_of(), Sampling(2, 12))
