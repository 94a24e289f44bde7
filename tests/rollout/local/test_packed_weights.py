"""Decoding with weights in oneDNN's layout: the same products, and never those of older weights."""

import platform
from typing import Any

import pytest
import torch
from torch import nn

from hwgrpo.rollout.local import packed_weights as module
from hwgrpo.rollout.local.adapted_linear import Concatenated, read_joined, read_projection
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.rollout.local.packed_weights import PackedWeights, packed_weights
from hwgrpo.values import Sampling
from tests.rollout.decoders import CPU, EXTRA, PROMPTS, assert_equal, batch_of, both_ways, engine_of, model_of
from tests.rollout.local.test_adapted_linear import adapted, fill

GREEDY = Sampling(2, 12, greedy=True)
WEIGHTS = 3 * 4 + 1
"""Of the tiny models: four products of each layer, and the LM head."""
SCHEDULE = ([0, 0, 1, 2, 2], (3, [0, 2, 3]), (2, None))

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="weights are packed on x86 processors"
)


@pytest.fixture(autouse=True)
def small_weights_are_packed(monkeypatch):
    monkeypatch.setattr(module, "LEAST_ELEMENTS", 1)


def layers(*outputs: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> Any:
    torch.manual_seed(3)
    return [nn.Linear(48, each, bias=bias, dtype=dtype).requires_grad_(False) for each in outputs]


def on_a(vendor: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nvendor_id : {vendor}\n")
    monkeypatch.setattr(module, "CPUINFO", tmp_path / "cpuinfo")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_torch(dtype, bias):
    parts = layers(16, 8, 24, dtype=dtype, bias=bias)
    hidden, total = torch.randn(5, 48, dtype=dtype), torch.randn(5, 48, dtype=dtype)
    plain = read_joined(*parts)
    packed = plain.by_packed(PackedWeights())
    assert packed.product is not None
    # 48 products and a sum of rounded values of about 1
    tolerance = {"rtol": 0, "atol": 48 * torch.finfo(dtype).eps}
    torch.testing.assert_close(packed(hidden), plain(hidden), **tolerance)
    sums = [total.clone(), total.clone()]
    plain.add_to(sums[0], hidden, 0.5)
    packed.add_to(sums[1], hidden, 0.5)
    torch.testing.assert_close(*sums, **tolerance)
    assert not torch.equal(sums[0], total)


@pytest.mark.parametrize("family", EXTRA)
@pytest.mark.parametrize("make", [lambda family: model_of(family).requires_grad_(False), adapted], ids=["all", "lora"])
def test_logits_are_those_of_the_model(family, make):
    packed = PackedWeights()
    assert_equal(both_ways(make(family), PROMPTS, SCHEDULE, make=lambda model: LeanRows(model, CPU, packed=packed)))
    assert len(packed._packed) == WEIGHTS


def test_an_update_in_place_of_any_part_is_packed_again():
    parts, packed, hidden = layers(16, 8), PackedWeights(), torch.randn(3, 48)
    joined = read_joined(*parts).by_packed(packed)
    before = joined(hidden)
    with torch.no_grad():
        parts[1].weight.mul_(2)
    assert torch.equal(joined(hidden), before), "not before it is asked for"
    packed.refresh()
    torch.testing.assert_close(joined(hidden), torch.cat([part(hidden) for part in parts], dim=1))
    held = packed._packed.copy()
    with torch.no_grad():
        parts[0].weight[0, 1] += 3  # one element
    again = read_joined(*parts).by_packed(packed)
    assert packed._packed == held, "read again, in the same place"
    torch.testing.assert_close(again(hidden), torch.cat([part(hidden) for part in parts], dim=1))


def test_an_update_that_torch_does_not_count_is_packed_again():
    """As peft's: `weight.data += delta`."""
    model, packed = adapted("Qwen3"), PackedWeights()
    LeanRows(model, CPU, packed=packed)
    model.merge_adapter()
    assert_equal(both_ways(model, PROMPTS, SCHEDULE, make=lambda merged: LeanRows(merged, CPU, packed=packed)))
    model.unmerge_adapter()
    assert_equal(both_ways(model, PROMPTS, SCHEDULE, make=lambda again: LeanRows(again, CPU, packed=packed)))


def test_a_weight_that_moved_in_memory_is_packed_again():
    [layer], packed, hidden = layers(16), PackedWeights(), torch.randn(3, 48)
    read_projection(layer).by_packed(packed)
    layer.weight.data = layer.weight.data * 2
    torch.testing.assert_close(read_projection(layer).by_packed(packed)(hidden), layer(hidden))


def test_trained_weights_are_not_packed_and_oneDNN_multiplies_in_fp32_where_MKL_is_not_on_Intel(tmp_path, monkeypatch):
    one, other = layers(16, 8)
    other.requires_grad_(True)
    hidden = torch.randn(3, 48)
    for vendor, ours in (("AuthenticAMD", True), ("GenuineIntel", False)):
        on_a(vendor, tmp_path, monkeypatch)
        packed = PackedWeights()
        joined = read_joined(one, other).by_packed(packed)
        assert isinstance(joined, Concatenated)
        assert [part.product is not None for part in joined.parts] == [True, ours]
        assert len(packed._packed) == 1
        with torch.no_grad():
            other.weight.mul_(2)  # an optimizer's step
            torch.testing.assert_close(joined(hidden), torch.cat([one(hidden), other(hidden)], dim=1))
    in_16_bits = layers(16, dtype=torch.bfloat16)[0].requires_grad_(True)
    assert read_projection(in_16_bits).by_packed(PackedWeights()).product is None, "torch's product is oneDNN's"


def test_weights_beyond_the_limit_stay_as_they_are(tmp_path, monkeypatch):
    on_a("GenuineIntel", tmp_path, monkeypatch)
    one, other = layers(16, 8, bias=False)
    monkeypatch.setattr(module, "MOST_BYTES", one.weight.nbytes + other.weight.nbytes - 1)
    packed = PackedWeights()
    for _ in range(2):
        found = [read_projection(each).by_packed(packed).product is not None for each in (one, other)]
        assert found == [True, False]


def test_weights_that_are_too_small_gain_nothing(monkeypatch):
    monkeypatch.setattr(module, "LEAST_ELEMENTS", 16 * 48 + 1)
    assert read_projection(layers(16)[0]).by_packed(PackedWeights()).product is None


def test_other_devices_and_processors_keep_torch_s_products(monkeypatch):
    assert packed_weights("meta", torch.float32) is None
    assert packed_weights("cpu", torch.float64) is None
    assert packed_weights("cpu", torch.float32) is not None
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert packed_weights("cpu", torch.float32) is None


@pytest.mark.parametrize("options", [{}, {"merge_adapters": True}, {"compute_dtype": torch.bfloat16}], ids=str)
def test_the_engine_samples_with_the_weights_of_now(options, monkeypatch):
    """Of shared frozen weights, of merged ones that are set anew, and of a copy in another dtype."""
    model = adapted("Qwen3")
    engine = engine_of(model, **options)
    packs = engine._packed is not None  # a processor may lack the products in bf16
    engine.generate(batch_of(), GREEDY)
    assert engine.decode_path == "lean"
    assert not packs or len(engine._packed._packed) == WEIGHTS
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(-1.5)
    engine.update_weights(1)
    found = engine.generate(batch_of(), GREEDY)
    monkeypatch.setattr("hwgrpo.rollout.local.engine.packed_weights", lambda *_: None)
    expected = engine_of(model, **options).generate(batch_of(), GREEDY)
    assert found.texts == expected.texts
    tolerance = 1e-4 if options.get("compute_dtype") is None else 0.2
    torch.testing.assert_close(*map(torch.as_tensor, (found.logprobs, expected.logprobs)), rtol=0, atol=tolerance)
    fill(model)
    engine.update_weights(2)
    assert engine.generate(batch_of(), GREEDY).texts != expected.texts, "the update had an effect"


def test_a_full_copy_that_training_updates_is_packed_again_and_dropped_by_sleep():
    model = model_of("Llama")  # trained, in fp32
    engine = engine_of(model, compute_dtype=torch.bfloat16)
    if engine._packed is None:
        pytest.skip("this processor has no products in bf16")
    first = engine.generate(batch_of(), GREEDY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    engine.update_weights(1)
    found = engine.generate(batch_of(), GREEDY)
    expected = engine_of(model, compute_dtype=torch.bfloat16).generate(batch_of(), GREEDY)
    assert found.texts == expected.texts
    assert torch.equal(torch.as_tensor(found.logprobs), torch.as_tensor(expected.logprobs))
    assert found.texts != first.texts
    engine.sleep()
    assert not engine._packed._packed


def test_rows_that_decode_meanwhile_go_on_with_updated_weights():
    model, packed = model_of("Llama").requires_grad_(False), PackedWeights()
    rows, plain = LeanRows(model, CPU, packed=packed), LeanRows(model, CPU)
    tokens = torch.tensor([5])
    for each in (rows, plain):
        numbers, _ = each.prefill([PROMPTS[0]])
        each.arrange(~torch.tensor(numbers).numpy(), torch.tensor([5]).numpy())
        each.step(tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    for each in (rows, plain):
        each.weights_changed()
    torch.testing.assert_close(rows.step(tokens), plain.step(tokens))
