"""What engines are given of the policy: exactly what its folder in Hugging Face format would hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny import VOCAB, tiny_llama, tiny_qwen3
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hwgrpo.config.schema import LoraConfig
from hwgrpo.models.lora import TRAINED_ADAPTER, apply_lora
from hwgrpo.rollout.weights import ModuleWeights


def tiny_moe() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return Qwen3MoeForCausalLM(config)


def adapted(model: Any, **changes: Any) -> Any:
    wrapped = apply_lora(model, LoraConfig(rank=4, **changes))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return wrapped


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor.float()), name


def collected(weights: ModuleWeights) -> dict[str, torch.Tensor]:
    pairs = list(weights.whole())
    assert len(pairs) == len(dict(pairs)), "a name came twice"
    return dict(pairs)


@pytest.mark.parametrize(
    "make", [tiny_qwen3, lambda: tiny_qwen3(tied=False), tiny_llama, tiny_moe], ids=["tied", "untied", "llama", "moe"]
)
def test_the_whole_weights_are_those_of_the_saved_model(make, tmp_path: Path):
    model = make()
    model.save_pretrained(tmp_path)
    assert_same(collected(ModuleWeights(model)), load_file(tmp_path / "model.safetensors"))


def test_a_later_pass_yields_the_weights_of_then():
    model = tiny_llama()
    weights = ModuleWeights(model)
    before = {name: tensor.clone() for name, tensor in weights.whole()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    for name, tensor in weights.whole():
        torch.testing.assert_close(tensor, before[name] + 1.0)


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "down_proj"]])
def test_below_adapters_the_whole_weights_are_those_of_the_base_model(targets: list[str], tmp_path: Path):
    model = tiny_qwen3()
    model.save_pretrained(tmp_path)
    assert_same(
        collected(ModuleWeights(adapted(model, target_modules=targets))), load_file(tmp_path / "model.safetensors")
    )


def test_the_adapter_is_the_one_that_peft_saves(tmp_path: Path):
    model = adapted(tiny_qwen3())
    model.save_pretrained(str(tmp_path))
    adapter = ModuleWeights(model).adapter()
    assert adapter is not None
    assert_same(dict(adapter.tensors), load_file(tmp_path / "adapter_model.safetensors"))
    assert adapter.settings["r"] == 4
    assert isinstance(adapter.settings["target_modules"], list)


def test_of_an_adapter_that_is_trained_further_the_frozen_copy_is_left_out(tmp_path: Path):
    adapted(tiny_qwen3()).save_pretrained(str(tmp_path))
    further = apply_lora(tiny_qwen3(), LoraConfig(adapter=str(tmp_path)))
    assert isinstance(further, PeftModel)
    with torch.no_grad():
        for name, parameter in further.named_parameters():
            if f"lora_B.{TRAINED_ADAPTER}" in name:
                parameter.fill_(2.0)
    adapter = ModuleWeights(further).adapter()
    assert adapter is not None
    assert all((tensor == 2.0).all() for name, tensor in adapter.tensors.items() if "lora_B" in name)
    assert len(adapter.tensors) == len(load_file(tmp_path / "adapter_model.safetensors"))


def test_a_model_without_adapters_has_none():
    assert ModuleWeights(tiny_qwen3()).adapter() is None
