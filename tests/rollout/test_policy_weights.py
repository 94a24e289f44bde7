"""What engines are given of the policy: exactly what its folder in Hugging Face format would hold."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter

from hwgrpo.config.schema import LoraConfig
from hwgrpo.models.lora import TRAINED_ADAPTER, apply_lora
from hwgrpo.rollout.policy_weights import ModuleWeights, PolicyWeights, ShardedWeights
from tests.support.models.tiny import VOCAB, tiny_llama, tiny_qwen3


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


def one_at_a_time(model: Any) -> ShardedWeights:
    """Return the weights of a model as a strategy yields them: in memory that the next one overwrites."""

    def whole(trainable_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or not trainable_only:
                lent = parameter.detach().clone()
                yield name, lent
                lent.fill_(torch.nan)

    return ShardedWeights(model, whole)


KEPT = pytest.mark.parametrize("kept", [ModuleWeights, one_at_a_time], ids=["whole", "sharded"])


def collected(weights: PolicyWeights) -> dict[str, torch.Tensor]:
    pairs = [(name, tensor.clone()) for name, tensor in weights.full()]
    assert len(pairs) == len(dict(pairs)), "a name came twice"
    return dict(pairs)


@pytest.mark.parametrize(
    "make", [tiny_qwen3, lambda: tiny_qwen3(tied=False), tiny_llama, tiny_moe], ids=["tied", "untied", "llama", "moe"]
)
@KEPT
def test_the_whole_weights_are_those_of_the_saved_model(make, kept, tmp_path: Path):
    model = make()
    model.save_pretrained(tmp_path)
    assert_same(collected(kept(model)), load_file(tmp_path / "model.safetensors"))


@KEPT
def test_weights_that_a_checkpoint_holds_as_one_come_joined(kept):
    model = tiny_llama()
    model._weight_conversions = [  # pyright: ignore[reportAttributeAccessIssue]
        WeightConverter("mlp.gate_up_proj.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)])
    ]
    found = collected(kept(model))
    for number, layer in enumerate(model.model.layers):
        joined = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
        assert torch.equal(found[f"model.layers.{number}.mlp.gate_up_proj.weight"], joined)
    assert not [name for name in found if "up_proj" in name and "gate_up" not in name]


def test_of_shards_a_weight_is_gone_when_the_next_but_one_comes():
    model, alive = tiny_moe(), []

    def whole(trainable_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            assert len([name for name, lent in alive if lent() is not None]) < 2
            lent = parameter.detach().clone()
            alive.append((name, weakref.ref(lent)))
            yield name, lent
            del lent

    names = []
    for name, weight in ShardedWeights(model, whole).full():
        names.append(name)
        del weight
    assert len(alive) == len(list(model.parameters())) < len(names), "experts come one by one"


def test_buffers_that_checkpoints_hold_are_among_the_weights_of_shards():
    model = tiny_llama()
    model.model.register_buffer("steps", torch.tensor(3.0))
    assert float(collected(one_at_a_time(model))["model.steps"]) == 3.0
    assert not [name for name in collected(one_at_a_time(model)) if "inv_freq" in name]


def test_a_later_pass_yields_the_weights_of_then():
    model = tiny_llama()
    weights = ModuleWeights(model)
    before = {name: tensor.clone() for name, tensor in weights.full()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    for name, tensor in weights.full():
        torch.testing.assert_close(tensor, before[name] + 1.0)


@KEPT
@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "down_proj"]])
def test_below_adapters_the_whole_weights_are_those_of_the_base_model(targets: list[str], kept, tmp_path: Path):
    model = tiny_qwen3()
    model.save_pretrained(tmp_path)
    found = collected(kept(adapted(model, target_modules=targets)))
    assert_same(found, load_file(tmp_path / "model.safetensors"))


@KEPT
def test_the_adapter_is_the_one_that_peft_saves(kept, tmp_path: Path):
    model = adapted(tiny_qwen3())
    model.save_pretrained(str(tmp_path))
    adapter = kept(model).adapter()
    assert adapter is not None
    assert_same(dict(adapter.tensors), load_file(tmp_path / "adapter_model.safetensors"))
    assert adapter.settings["r"] == 4
    assert isinstance(adapter.settings["target_modules"], list)


@KEPT
def test_of_an_adapter_that_is_trained_further_the_frozen_copy_is_left_out(kept, tmp_path: Path):
    adapted(tiny_qwen3()).save_pretrained(str(tmp_path))
    further = apply_lora(tiny_qwen3(), LoraConfig(adapter=str(tmp_path)))
    assert isinstance(further, PeftModel)
    with torch.no_grad():
        for name, parameter in further.named_parameters():
            if f"lora_B.{TRAINED_ADAPTER}" in name:
                parameter.fill_(2.0)
    adapter = kept(further).adapter()
    assert adapter is not None
    assert all((tensor == 2.0).all() for name, tensor in adapter.tensors.items() if "lora_B" in name)
    assert len(adapter.tensors) == len(load_file(tmp_path / "adapter_model.safetensors"))


def test_a_model_without_adapters_has_none():
    assert ModuleWeights(tiny_qwen3()).adapter() is None
    assert one_at_a_time(tiny_qwen3()).adapter() is None


@KEPT
def test_the_trainable_parameters_come_under_their_names_in_the_model(kept):
    model = adapted(tiny_qwen3(), target_modules=["q_proj"])
    expected = {
        name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    assert_same({name: tensor.clone() for name, tensor in kept(model).trainable()}, expected)
    assert expected
