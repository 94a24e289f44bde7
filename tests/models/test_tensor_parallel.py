"""What of a decoder layer is cut over ranks by transformers' plan, and which layers are refused."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hwgrpo.errors import ConfigError
from hwgrpo.models.layers import decoder_layers
from hwgrpo.models.tensor_parallel import ShardSpec, TensorParallel, reason_against_plan
from tests.support.models.tiny import tiny_llama, tiny_qwen3


def shard(model: Any, size: int, rank: int = 0) -> TensorParallel:
    layers = TensorParallel(model, size, rank, group=None)
    for layer in decoder_layers(model):
        layers.shard(layer)
    return layers


def test_each_rank_has_rows_of_colwise_and_columns_of_rowwise_layers():
    whole = dict(tiny_qwen3().named_parameters())
    models = [tiny_qwen3() for _ in range(2)]
    shards = [shard(model, 2, rank).shards for rank, model in enumerate(models)]
    assert shards[0] == shards[1]
    assert len(shards[0]) == 2 * 7
    parts = [dict(model.named_parameters()) for model in models]
    for name, weight in whole.items():
        if name not in shards[0]:
            assert torch.equal(parts[0][name], weight)
            continue
        dim = 1 if "o_proj" in name or "down_proj" in name else 0
        assert shards[0][name] == ShardSpec(dim, tuple(weight.shape))
        assert torch.equal(torch.cat([part[name] for part in parts], dim), weight)
    layer = models[0].model.layers[0]
    assert (layer.mlp.down_proj.in_features, layer.mlp.up_proj.out_features) == (24, 24)
    assert layer.mlp.down_proj.weight.requires_grad


def test_frozen_weights_stay_frozen_and_no_shard_keeps_the_full_weight_in_memory():
    model = tiny_llama().requires_grad_(False)
    shard(model, 2)
    for weight in (model.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.down_proj.weight):
        assert not weight.requires_grad
        assert weight.untyped_storage().nbytes() == weight.nbytes


def test_biases_of_colwise_layers_are_sharded_and_of_rowwise_layers_are_not():
    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=8)
    config.attention_bias = True
    shards = shard(LlamaForCausalLM(config), 4).shards
    assert shards["model.layers.0.self_attn.q_proj.bias"] == ShardSpec(0, (16,))
    assert "model.layers.0.self_attn.o_proj.bias" not in shards


def test_modules_outside_of_layers_may_have_any_style():
    plan = {"layers.*.mlp.up_proj": "colwise", "lm_head": "anything"}
    assert reason_against_plan(plan) is None
    assert (
        reason_against_plan({"lm_head": "colwise"})
        == reason_against_plan(None)
        == "transformers has no tensor-parallel plan for it"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plan, layer: plan.clear(), "LlamaForCausalLM: transformers has no tensor-parallel plan for it"),
        (
            lambda plan, layer: plan.update({"model.layers.*.mlp.up_proj": "packed"}),
            "LlamaForCausalLM: its tensor-parallel plan has packed; supported are colwise, rowwise",
        ),
        (lambda plan, layer: plan.pop("model.layers.*.mlp.down_proj"), "makes no block of a LlamaMLP"),
        (
            lambda plan, layer: plan.update({"model.layers.*.input_layernorm": "colwise"}),
            r"model.layers.0.input_layernorm is a LlamaRMSNorm, not a linear layer",
        ),
        (
            lambda plan, layer: setattr(layer.mlp, "up_proj", torch.nn.Linear(32, 47)),
            r"it does not divide the 47 of model.layers.0.mlp.up_proj's weight",
        ),
    ],
)
def test_layers_that_cannot_be_cut_are_refused_with_the_remedy(change: Any, said: str):
    model = tiny_llama()
    plan = dict(model.tp_plan)
    change(plan, model.model.layers[0])
    model._tp_plan = plan
    with pytest.raises(ConfigError, match=rf"trainer.tensor_parallel_size=2: .*{said}.*; use trainer.tensor_par.*=1"):
        shard(model, 2)
