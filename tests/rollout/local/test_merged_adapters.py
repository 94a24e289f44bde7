"""Sampling with a copy of the weights in which the adapters are merged."""

import json
from typing import Any

import pytest
import torch

from hwgrpo.config import load_config
from hwgrpo.errors import ConfigError
from hwgrpo.rollout.local.adapted_linear import is_adapted
from hwgrpo.rollout.local.merged_adapters import MERGED_IN_16_BITS, merge
from hwgrpo.values import Sampling
from tests.rollout.decoders import PROMPTS, batch_of, engine_of, model_of
from tests.rollout.local.test_adapted_linear import adapted, fill
from tests.support.runs import runs

GREEDY = Sampling(2, 12, greedy=True)
LAYER = "base_model.model.model.layers.1.mlp.up_proj"


@pytest.fixture
def model():
    return adapted("Qwen3", use_rslora=True)


def test_the_policy_s_own_weights_stay_as_they_are_and_samples_are_those_of_its_adapters(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    merged, separate = engine_of(model, merge_adapters=True), engine_of(model)
    assert merged.decode_path == separate.decode_path == "lean"
    assert merged.generate(batch_of(), GREEDY).texts == separate.generate(batch_of(), GREEDY).texts
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not any(module.merged for module in model.modules() if is_adapted(module))
    layer: Any = model.get_submodule(LAYER)
    copied: Any = merged._sampler.get_submodule(LAYER)
    delta = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert float(delta.detach().abs().max()) > 0.1
    torch.testing.assert_close(copied.base_layer.weight, layer.base_layer.weight + delta)


def test_only_weights_with_adapters_and_those_beside_them_are_copied():
    model = adapted("Llama", target_modules=["q_proj"])
    engine = engine_of(model, merge_adapters=True)
    copied = {
        name
        for name, parameter in engine._sampler.named_parameters()
        if parameter is not model.get_parameter(name) and "lora_" not in name
    }
    beside = {name for name, _ in model.named_parameters() if "self_attn" in name and "lora_" not in name}
    assert copied == beside
    where = {name: parameter.untyped_storage().data_ptr() for name, parameter in model.named_parameters()}
    engine.sleep()
    engine.update_weights(1)
    engine.generate(batch_of(), GREEDY)
    theirs = {
        parameter.untyped_storage().data_ptr()
        for name, parameter in engine._sampler.named_parameters()
        if name in beside
    }
    assert theirs.isdisjoint(where.values())


@pytest.mark.parametrize("sleeps", [False, True])
def test_an_update_of_the_adapters_is_merged_anew(model, sleeps):
    engine = engine_of(model, merge_adapters=True)
    before = engine.generate(batch_of(), GREEDY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.5)
    if sleeps:
        engine.sleep()
    engine.update_weights(1)
    after = engine.generate(batch_of(), GREEDY)
    assert after.texts != before.texts
    assert after.texts == engine_of(model).generate(batch_of(), GREEDY).texts


def test_scores_are_those_with_adapters_and_there_are_none_without(model):
    merged, sequences = engine_of(model, merge_adapters=True), [PROMPTS[0]]
    found = merged.score(sequences)
    assert found is not None
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(sequences)).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(2, torch.tensor(sequences)[:, 1:, None])[..., 0]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-4)
    assert merged.score(sequences, adapter=False) is None


def test_a_merged_weight_is_rounded_once(model):
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "lora_" in name else torch.bfloat16)
    fill(model)
    engine = engine_of(model, compute_dtype=torch.bfloat16, merge_adapters=True)
    layer: Any = model.get_submodule(LAYER)
    exact = layer.base_layer.weight.double() + layer.scaling["default"] * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    copied: Any = engine._sampler.get_submodule(LAYER)
    merged = copied.base_layer.weight
    error = (merged.double() - exact).abs()
    assert bool((error <= exact.abs() * torch.finfo(torch.bfloat16).eps / 2 * 1.001 + 1e-7).all())


def test_small_changes_are_rounded_away_in_16_bits_and_the_engine_says_so(model):
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "lora_" in name else torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(1e-5)
    merged, separate = (engine_of(model, compute_dtype=torch.bfloat16, merge_adapters=on) for on in (True, False))
    base: Any = model.get_submodule(LAYER)
    copied: Any = merged._sampler.get_submodule(LAYER)
    assert float((copied.base_layer.weight == base.base_layer.weight).float().mean()) > 0.9
    assert MERGED_IN_16_BITS in merged.notes
    assert MERGED_IN_16_BITS not in separate.notes
    assert MERGED_IN_16_BITS not in engine_of(adapted("Llama"), merge_adapters=True).notes


@pytest.mark.parametrize("make", [lambda: model_of("Llama"), lambda: adapted("Llama", use_dora=True)])
def test_a_model_without_plain_adapters_is_refused(make):
    with pytest.raises(
        ConfigError, match=r"rollout.merge_adapters=true: .* has no linear layer with plain LoRA to merge"
    ):
        engine_of(make(), merge_adapters=True)


@pytest.mark.parametrize("other", ["model.quantize=int8", "model.lora.dora=true"])
def test_settings_whose_adapters_cannot_be_merged_are_refused(other):
    words = ["model.lora.rank=4", "rollout.merge_adapters=true", other]
    with pytest.raises(ConfigError, match=f"rollout.merge_adapters=true with {other}: only plain LoRA"):
        load_config("tiny_sort", words)


def test_a_run_samples_with_merged_adapters(tmp_path):
    words = (
        "model.lora.rank=4",
        "algorithm.correction.name=token_truncate",
        "rollout.merge_adapters=true",
        "trainer.max_steps=3",
        "optim.lr=0.02",
    )
    assert runs.forked(lambda: runs.run(tmp_path / "run", *words)) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    gaps = [row["rollout_corr/kl"] for row in rows if "rollout_corr/kl" in row]
    assert len(gaps) == 3
    assert max(map(abs, gaps)) < 1e-4


def test_merging_from_a_copy_s_own_weights_is_not_repeated(model):
    engine = engine_of(model, merge_adapters=True)
    copied: Any = engine._sampler.get_submodule(LAYER)
    once = copied.base_layer.weight.clone()
    merge(model, engine._sampler)
    assert torch.equal(copied.base_layer.weight, once)
