"""Fused modules in tiny models, with torch-npu's ops computed on the host as its documents define them."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from hwgrpo_kernels.module_replacement import MODULES, apply, attention, is_fused, rotary
from hwgrpo_kernels.module_replacement.self_test import TOLERANCE

from tests.support.numbers import npu_reference_ops
from tests.support.numbers.npu_module_cases import EVERY, FAMILIES, SHAPE, batch, losses_and_gradients, tiny
from tests.support.numbers.rounding import assert_gradients_close, assert_values_close, gaps


@pytest.fixture(autouse=True)
def _ops() -> Iterator[None]:
    with npu_reference_ops.registered():
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_taken_is_what_the_family_computes(family: str):
    applied = apply(tiny(family))
    assert {name for name, of in applied.replaced.items() if of} == FAMILIES[family][2], applied.line()
    left = {name for name, of in applied.skipped.items() if of}
    assert left == EVERY - FAMILIES[family][2], applied.line()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_loss_and_every_gradient_are_those_of_the_plain_model(family: str, padding: str):
    model = tiny(family)
    logprobs, gradients = losses_and_gradients(model, batch(padding))
    applied = apply(model)
    npu_reference_ops.calls.clear()
    fused_logprobs, fused_gradients = losses_and_gradients(model, batch(padding))
    ops = {module: f"npu_{module}" for module in MODULES} | {"rotary": "npu_rotary_mul", "attention": attention.OP}
    assert set(npu_reference_ops.calls) == {ops[name] for name, of in applied.replaced.items() if of}
    assert_values_close(fused_logprobs, logprobs)
    assert_gradients_close(fused_gradients, gradients)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "glm4"])
def test_one_module_alone_changes_no_number(family: str, module: str):
    if module not in FAMILIES[family][2]:
        assert not apply(tiny(family), [module]).replaced[module]
        return
    model = tiny(family)
    logprobs, gradients = losses_and_gradients(model, batch("right"))
    assert apply(model, [module]).replaced[module]
    fused_logprobs, fused_gradients = losses_and_gradients(model, batch("right"))
    assert_values_close(fused_logprobs, logprobs)
    assert_gradients_close(fused_gradients, gradients)


def test_bf16_stays_within_a_few_units_in_the_last_place():
    model = tiny("qwen3").bfloat16()
    logprobs, _ = losses_and_gradients(model, batch("right"))
    applied = apply(model)
    assert all(applied.replaced.values()), applied.line()
    fused, _ = losses_and_gradients(model, batch("right"))
    exact, _ = losses_and_gradients(tiny("qwen3").bfloat16().float(), batch("right"))
    assert 0 < (fused - exact).norm() <= 2 * (logprobs - exact).norm()


def test_under_autocast_values_are_as_exact_as_the_plain_ones():
    model = tiny("qwen3")
    exact, exact_gradients = losses_and_gradients(model, batch("right"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, plain_gradients = losses_and_gradients(model, batch("right"))
    applied = apply(model, dtype=torch.bfloat16)
    assert all(applied.replaced.values()), applied.line()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused, fused_gradients = losses_and_gradients(model, batch("right"))
    assert 0 < (fused - exact).norm() <= 2 * (plain - exact).norm()
    ours, theirs = (
        torch.tensor([*gaps(each, exact_gradients).values()]) for each in (fused_gradients, plain_gradients)
    )
    assert ours.min() > 0
    assert ours.norm() <= 2 * theirs.norm()


@pytest.mark.parametrize("family", ["qwen3", "glm4", "mistral"])
def test_undo_puts_everything_back(family: str):
    model = tiny(family)
    settings = (model.config.to_dict(), model.config._attn_implementation, model.model.config._attn_implementation)
    keys, attributes = list(model.state_dict()), [sorted(vars(each)) for each in model.modules()]
    hooks = [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules()]
    before = losses_and_gradients(model, batch("left"))
    applied = apply(model)
    assert model.config._attn_implementation == attention.IMPLEMENTATION
    assert list(model.state_dict()) == keys
    applied.undo()
    assert (
        model.config.to_dict(),
        model.config._attn_implementation,
        model.model.config._attn_implementation,
    ) == settings
    assert [sorted(vars(each)) for each in model.modules()] == attributes
    assert [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules()] == hooks
    npu_reference_ops.calls.clear()
    after = losses_and_gradients(model, batch("left"))
    assert not npu_reference_ops.calls
    assert torch.equal(after[0], before[0])
    assert all(torch.equal(after[1][name], each) for name, each in before[1].items())
    applied.undo()


def test_another_model_of_the_same_classes_is_not_touched():
    other = tiny("qwen3")
    before = losses_and_gradients(other, batch("right"))
    apply(tiny("qwen3"))
    npu_reference_ops.calls.clear()
    after = losses_and_gradients(other, batch("right"))
    assert not npu_reference_ops.calls
    assert torch.equal(after[0], before[0])
    assert not any(is_fused(each) for each in other.modules())


def test_a_second_time_takes_nothing_and_its_undo_leaves_the_first():
    model = tiny("qwen3")
    first = apply(model)
    second = apply(model)
    assert not any(second.replaced.values())
    assert {reason for of in second.skipped.values() for reason in of.values()} == {"it is fused already"}
    second.undo()
    assert all(first.replaced.values())
    npu_reference_ops.calls.clear()
    losses_and_gradients(model, batch())
    assert len(npu_reference_ops.calls) == 4


def test_a_forward_that_somebody_else_replaced_is_left_and_one_replaced_since_stops_undo():
    model = tiny("llama")
    norm = model.model.norm
    norm.forward = type(norm).forward.__get__(norm)
    applied = apply(model, ["rms_norm"])
    assert applied.skipped["rms_norm"] == {"model.norm": "its forward is replaced already"}
    first = model.get_submodule(applied.replaced["rms_norm"][-1])
    first.forward = norm.forward
    with pytest.raises(ValueError, match="replaced again"):
        applied.undo()


def test_modes_gradients_and_random_numbers_are_as_before():
    model = tiny("qwen3").train()
    model.model.layers[0].eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    modes = [each.training for each in model.modules()]
    state = torch.random.get_rng_state()
    apply(model)
    assert [each.training for each in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(each.grad is None for each in model.parameters())
    assert not model.model.embed_tokens.weight.requires_grad


def test_a_deep_copy_runs_on_its_own_weights():
    model = tiny("qwen3")
    apply(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    expected, _ = losses_and_gradients(tiny("qwen3"), batch())
    found, _ = losses_and_gradients(twin, batch())
    assert_values_close(found, expected)


def test_a_saved_model_loads_plain(tmp_path):
    model = tiny("qwen3")
    apply(model)
    model.save_pretrained(tmp_path)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert_values_close(losses_and_gradients(loaded, batch())[0], losses_and_gradients(tiny("qwen3"), batch())[0])


@pytest.mark.parametrize("length", [1, 3])
def test_greedy_sampling_with_a_cache_gives_the_same_tokens(length: int):
    model = tiny("mistral")
    inputs = batch("left")
    inputs = {name: each[:, -8:] for name, each in inputs.items()}
    settings = {"max_new_tokens": length + 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **settings)
    apply(model)
    assert torch.equal(model.generate(**inputs, **settings), expected)


def test_the_first_call_in_inference_mode_does_not_spoil_training():
    attention._triangle.cache_clear()
    model = tiny("llama")
    apply(model, ["attention"])
    attention._triangle.cache_clear()
    with torch.inference_mode():
        model(**batch())
    # the op saves its mask for the backward pass, which takes no tensor of inference mode
    assert not attention._triangle(torch.device("cpu")).is_inference()


def test_gradient_checkpointing_changes_no_gradient():
    model = tiny("qwen3").train()
    expected = losses_and_gradients(model, batch())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    apply(model)
    found = losses_and_gradients(model, batch())
    assert_gradients_close(found[1], expected[1])


def test_more_rows_than_the_op_takes_rotate_as_before():
    model = tiny("llama")
    inputs = {"input_ids": torch.arange(3000).view(1000, 3) % SHAPE["vocab_size"]}
    expected, _ = losses_and_gradients(model, inputs)
    apply(model, ["rotary"])
    npu_reference_ops.calls.clear()
    found, _ = losses_and_gradients(model, inputs)
    assert not npu_reference_ops.calls
    assert torch.equal(found, expected)


def test_without_the_ops_nothing_is_taken_and_the_reason_says_so():
    model = tiny("qwen3")
    for name in npu_reference_ops.OPS:
        vars(torch.ops.npu).pop(name, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "npu", torch._ops._OpNamespace("hwgrpo_no_such_namespace"))
        applied = apply(model)
    assert not any(applied.replaced.values())
    assert applied.skipped["rms_norm"] == {"": "this torch-npu has no npu_rms_norm, or is not imported"}
    assert "rms_norm: none (this torch-npu has no npu_rms_norm" in applied.line()


def test_a_self_test_out_of_memory_raises_and_restores_the_model(monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch.ops.npu, "npu_swiglu", full)  # self-tested after norms and rotations were replaced
    model = tiny("qwen3")
    with pytest.raises(torch.OutOfMemoryError):
        apply(model)
    assert not any(is_fused(each) for each in model.modules())
    assert model.config._attn_implementation == "sdpa"


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"'rmsnorm' is not a fused module.*Did you mean 'rms_norm'"):
        apply(tiny("qwen2"), ["rmsnorm"])


REASONS = [
    ("gemma", "rms_norm", "it multiplies by 1 + weight"),
    ("gemma", "swiglu", "its gate is GELUTanh, not SiLU"),
    ("glm4", "rotary", "it rotates 4 of the 8 elements of a head"),
    ("cohere", "rotary", "it does not rotate halves of a head (it may rotate interleaved pairs)"),
    ("cohere", "rms_norm", "the model has no such module"),
    ("llama with gelu", "swiglu", "its gate is GELUActivation, not SiLU"),
]


@pytest.mark.parametrize("family,module,reason", REASONS)
def test_skipped_modules_have_a_reason(family: str, module: str, reason: str):
    applied = apply(tiny(family))
    assert set(applied.skipped[module].values()) == {reason}


def test_soft_capped_attention_is_left():
    config = transformers.Gemma2Config(**SHAPE)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    applied = apply(model, ["attention"])
    assert applied.skipped["attention"] == {"": "the model soft-caps attention scores (attn_logit_softcapping)"}
    assert model.config._attn_implementation == "eager"


def test_attention_raises_for_unsupported_options():
    q = torch.randn(1, 2, 3, 8)
    layer = torch.nn.Module()
    with pytest.raises(ValueError, match="does not support softcap, which Module passes"):
        attention.fusion_attention(layer, q, q, q, None, softcap=30.0)
    with pytest.raises(ValueError, match="does not support dropout"):
        attention.fusion_attention(layer, q, q, q, None, dropout=0.1)


def test_a_query_that_sees_no_key_sees_all_of_them():
    q, k, v = torch.randn(3, 1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    mask[:, :, 0] = False
    found, _ = attention.fusion_attention(torch.nn.Module(), q, k, v, mask)
    mask[:, :, 0] = True
    expected, _ = attention.plain_attention(torch.nn.Module(), q, k, v, mask)
    assert_values_close(found, expected)


def test_heads_larger_than_the_op_takes_rotate_as_before():
    q = torch.randn(1, 1, 2, 896)
    plain = rotary.plain_of(tiny("llama").model.layers[0].self_attn)
    rotate, angles = rotary.rotation_by_op(plain), torch.randn(1, 2, q.shape[-1])
    assert torch.equal(rotate(q, q, angles, angles)[0], plain(q, q, angles, angles)[0])
    assert not npu_reference_ops.calls


def test_attention_with_dropout_is_left():
    applied = apply(tiny("llama", attention_dropout=0.1))
    assert applied.skipped["attention"] == {"": "the model has attention dropout"}


def test_lora_adapters_are_trained_through_fused_modules():
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(tiny("qwen3"), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    logprobs, gradients = losses_and_gradients(model, batch("right"))
    applied = apply(model)
    assert all(applied.replaced.values()), applied.line()
    fused_logprobs, fused_gradients = losses_and_gradients(model, batch("right"))
    assert_values_close(fused_logprobs, logprobs)
    assert gradients
    assert_gradients_close(fused_gradients, gradients)
    merged = copy.deepcopy(model).merge_and_unload()
    plain = tiny("qwen3")
    plain.load_state_dict(merged.state_dict())
    assert any(is_fused(each) for each in merged.modules())
    assert_values_close(plain(**batch()).logits, model(**batch()).logits)
    assert_values_close(merged(**batch()).logits, model(**batch()).logits)


def test_the_tolerances_are_a_few_units_in_the_last_place():
    for dtype, tolerance in TOLERANCE.items():
        assert tolerance <= (8 if dtype != torch.float32 else 1000) * torch.finfo(dtype).eps
