"""LoRA adapters in the lean step, against peft's own forward."""

from typing import Any

import peft
import pytest
import torch

from hwgrpo.rollout.local.architectures import unsupported_reason
from hwgrpo.rollout.local.decode_graph import RecordedRows
from hwgrpo.rollout.local.decode_rows import ModelRows
from hwgrpo.rollout.local.lean_step import LeanRows
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
)
from tests.support.devices.recorder import Recorder

SCHEDULE = ([0, 0, 1, 2, 2], (3, [0, 2, 3]), (2, None))


def adapted(family: str, **settings: Any) -> Any:
    """A model with adapters that do something: new ones are zero."""
    defaults = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "lora_dropout": 0.3, "task_type": "CAUSAL_LM"}
    wrapped = peft.get_peft_model(model_of(family), peft.LoraConfig(**defaults | settings))
    fill(wrapped)
    return wrapped.eval()


def fill(model) -> None:
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)


def difference(model) -> float:
    """How much of the logits the adapters make."""
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        with_them = model(input_ids=ids).logits
        with model.disable_adapter():
            return float((with_them - model(input_ids=ids).logits).abs().max())


@pytest.mark.parametrize("family", EXTRA)
def test_logits_with_adapters_are_those_of_pefts_forward(family):
    model = adapted(family)
    assert difference(model) > 0.1
    assert unsupported_reason(model, 100) is None
    assert_equal(both_ways(model, PROMPTS, SCHEDULE))


def test_adapters_of_some_layers_and_of_the_head_are_read():
    model = adapted("Qwen2", target_modules=["q_proj", "down_proj", "lm_head"], use_rslora=True)
    assert unsupported_reason(model, 100) is None
    assert_equal(both_ways(model, PROMPTS, SCHEDULE))


def test_only_active_adapters_are_added():
    model = adapted("Llama")
    model.add_adapter("reference", peft.LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    fill(model)
    assert_equal(both_ways(model, PROMPTS, SCHEDULE))
    model.base_model.set_adapter(["default", "reference"])
    both = both_ways(model, PROMPTS, SCHEDULE)
    assert_equal(both)
    with model.disable_adapter():
        assert unsupported_reason(model, 100) is None
        neither = both_ways(model, PROMPTS, SCHEDULE)
        assert_equal(neither)
    assert not torch.allclose(both[0][1], neither[0][1])


def test_merged_adapters_are_not_added_twice():
    model = adapted("Llama")
    model.merge_adapter()
    assert unsupported_reason(model, 100) is None
    assert_equal(both_ways(model, PROMPTS, SCHEDULE))


def test_a_step_with_adapters_can_be_recorded():
    def make(model):
        return RecordedRows(LeanRows(model, CPU, fixed=True), Recorder())

    assert_equal(both_ways(adapted("Qwen3"), PROMPTS, SCHEDULE, make=make))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_engine_decodes_an_adapted_policy_by_the_lean_step(dtype, monkeypatch):
    model = adapted("Qwen3").train()
    greedy = Sampling(2, 16, greedy=True)
    engine = engine_of(model, compute_dtype=dtype)
    assert engine.decode_path == "lean"
    found = engine.generate(batch_of(), greedy)
    assert all(module.training for module in model.modules()), "put back as they were"
    monkeypatch.setattr("hwgrpo.rollout.local.engine.check_lean_step", lambda *_, **__: "it is disabled")
    own = engine_of(model, compute_dtype=dtype)
    expected = own.generate(batch_of(), greedy)
    assert own.decode_path == "model"
    if dtype == torch.float32:
        assert found.texts == expected.texts
    else:  # rounding differs, so a later token may; the first come from the same prefill
        assert torch.equal(found.tokens[found.offsets[:-1]], expected.tokens[expected.offsets[:-1]])


def test_what_an_optimizer_writes_into_adapters_is_what_samples():
    model = adapted("Llama")
    engine, greedy = engine_of(model), Sampling(1, 12, greedy=True)
    before = engine.generate(batch_of(), greedy)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(1.0)
    engine.update_weights(1)
    after = engine.generate(batch_of(), greedy)
    assert after.tokens.tolist() != before.tokens.tolist()
    assert after.tokens.tolist() == engine_of(model).generate(batch_of(), greedy).tokens.tolist()


def test_a_frozen_model_that_has_the_dtype_is_not_copied_for_its_adapters():
    model = adapted("Qwen3")
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "lora_" in name else torch.bfloat16)
    engine = engine_of(model, compute_dtype=torch.bfloat16)
    sampler = engine._sampler
    shared = {name for name, parameter in sampler.named_parameters() if parameter is model.get_parameter(name)}
    assert {name for name, _ in model.named_parameters()} - shared == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }
    assert {parameter.dtype for parameter in sampler.parameters()} == {torch.bfloat16}
    fill(model)
    with torch.no_grad():
        model.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight").mul_(3.0)
    engine.update_weights(1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sampler.get_parameter(name).float(), parameter.float(), rtol=1e-2, atol=1e-3)


def _dora():
    return adapted("Llama", use_dora=True)


def _bias():
    return adapted("Llama", lora_bias=True)


def _saved_module():
    return adapted("Llama", target_modules=["q_proj"], modules_to_save=["embed_tokens"])


def _embedding():
    return adapted("Llama", target_modules=["embed_tokens"])


class Special(torch.nn.Linear):
    """A subclass: it may do anything."""


def _base_layer():
    model = adapted("Llama")
    model.get_submodule("base_model.model.model.layers.1.mlp.up_proj").base_layer.__class__ = Special
    return model


def _other_method():
    return peft.get_peft_model(model_of("Llama"), peft.IA3Config(task_type="CAUSAL_LM"))


def _prompt_learning():
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(model_of("Llama"), settings)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_dora, "model.layers.0.self_attn.q_proj has an adapter of another kind (DoraLinearVariant)"),
        (_bias, "model.layers.0.self_attn.q_proj has an adapter with a bias or of other layers"),
        (_saved_module, "model.embed_tokens is a ModulesToSaveWrapper"),
        (_embedding, "model.embed_tokens is a Embedding"),
        (_base_layer, "model.layers.1.mlp.up_proj adapts a Special"),
        (_other_method, "its adapters (PeftModelForCausalLM) are not LoRA"),
        (_prompt_learning, "its adapters (PeftModelForCausalLM) are not LoRA"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_adapters_that_the_step_does_not_read_are_named(make, reason):
    assert unsupported_reason(make(), 10) == reason


def test_the_model_decodes_what_the_step_does_not_read():
    model = adapted("Llama", use_dora=True)
    engine = engine_of(model)
    assert engine.decode_path == "model"
    assert "DoraLinearVariant" in engine.notes[0]
    ids = engine.generate(batch_of(), Sampling(1, 4, greedy=True)).tokens[:4]
    rows = ModelRows(model, CPU)
    with torch.no_grad():
        logits = begin(rows, [PROMPTS[0]], [0])
        for token in ids:
            assert int(logits.argmax()) == int(token) < len(TOKENIZER)
            logits = rows.step(token[None])
