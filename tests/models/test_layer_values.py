"""Configurations whose decoder layers differ (`per_layer_config`), read by everything that reads a configuration."""

from pathlib import Path

import pytest
import torch
import transformers

from hwgrpo.config.schema import RolloutConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models.layer_values import head_sizes, largest_value, layer_values, smallest_value
from hwgrpo.models.windows import windows_below
from hwgrpo.planning import engine_choice
from hwgrpo.planning.model_shape import model_shape
from hwgrpo.rollout.vllm.vllm_settings import check_head_size
from hwgrpo.training.policy.auto_settings import AttentionSelection
from hwgrpo.training.sequence_checks import check_sequence_parallel
from hwgrpo.training.update.flops import model_work
from tests.support.models.families import FALLING_BACK, FAMILIES, SHAPE, run_settings

LAYERS = {0: {"head_dim": 8}, 1: {"head_dim": 64, "num_key_value_heads": 4, "intermediate_size": 96}}


def gemma4() -> transformers.Gemma4TextConfig:
    """Return layers with a sliding window and heads of size 8, and full ones with heads of size 16."""
    return transformers.Gemma4TextConfig(**SHAPE | FAMILIES["Gemma4"].extra)


def qwen3(**extra) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(**SHAPE | {"head_dim": 8, "per_layer_config": LAYERS} | extra)


def test_a_setting_is_read_from_the_layers_where_they_differ_and_from_the_configuration_where_not():
    config = qwen3()
    with pytest.raises(RuntimeError, match="per-layer attribute"):  # which no default of getattr catches
        getattr(config, "head_dim", None)
    assert layer_values(config, "head_dim") == [8, 64]
    assert head_sizes(config) == [8, 64]
    assert (largest_value(config, "intermediate_size"), smallest_value(config, "intermediate_size")) == (96, 48)
    assert layer_values(config, "hidden_size") == [32, 32]
    in_a_list = transformers.Gemma3nTextConfig(num_hidden_layers=2, intermediate_size=[48, 96])
    assert (layer_values(in_a_list, "intermediate_size"), largest_value(in_a_list, "intermediate_size")) == (
        [48, 96],
        96,
    )
    zamba = transformers.Zamba2Config(**SHAPE | FALLING_BACK["Zamba2"][0])
    zamba.per_layer_config = {1: {"attention_head_dim": 32}}
    assert layer_values(zamba, "head_dim") == [16, 32], "another name of the setting"
    ropes = transformers.Gemma3TextConfig().rope_parameters
    assert largest_value(transformers.Gemma3TextConfig(), "rope_parameters") == ropes, "no order, one value"
    assert (largest_value(config, "unknown", 5), smallest_value(config, "unknown")) == (5, None)


def test_each_layers_attention_counts_with_its_own_heads_and_window():
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(gemma4())
    work = model_work(model, model)
    assert work is not None
    heads = SHAPE["num_attention_heads"]
    assert dict(work.per_pair) == {4: 3 * 4 * heads * 8, None: 3 * 4 * heads * 16}


def test_a_plan_reckons_with_the_largest_layer():
    shape = model_shape(run_settings(Path("unused")).model, gemma4())
    assert (shape.head_dim, shape.value_dim, shape.kv_heads) == (16, 16, 2)


def test_every_layer_must_have_heads_that_vllm_has_on_a_cpu():
    rollout = RolloutConfig(engine="vllm")
    check_head_size(rollout, "unused", qwen3(per_layer_config={1: {"head_dim": 64}}, head_dim=32), on_host=True)
    with pytest.raises(ConfigError, match="no attention with heads of size 8, only of"):
        check_head_size(rollout, "unused", qwen3(), on_host=True)


def test_a_model_without_attention_has_no_heads_to_check():
    check_head_size(RolloutConfig(engine="vllm"), "unused", transformers.MambaConfig(hidden_size=32), on_host=True)


def test_the_heads_of_every_layer_must_divide_over_ranks():
    config = qwen3(per_layer_config={1: {"num_key_value_heads": 1}})
    ranks = run_settings(Path("unused"), "trainer.strategy=fsdp2", "trainer.tensor_parallel_size=2")
    check_sequence_parallel(ranks, qwen3(), AttentionSelection("sdpa"))
    with pytest.raises(ConfigError, match="does not divide the model's 1 key-value heads"):
        check_sequence_parallel(ranks, config, AttentionSelection("sdpa"))


def test_vllm_divides_a_model_over_devices_that_divide_the_heads_of_every_layer(monkeypatch):
    config = qwen3(num_attention_heads=6, per_layer_config={1: {"num_key_value_heads": 6}})
    monkeypatch.setattr(engine_choice, "planned_settings", lambda _: (config, None))
    assert engine_choice.rollout_sizes(run_settings(Path("unused")).model, 6) == [1, 2, 6]


def test_the_shortest_window_of_the_layers_counts():
    config = transformers.MistralConfig(
        **SHAPE | {"sliding_window": 64, "per_layer_config": {0: {"sliding_window": 16}, 1: {"sliding_window": None}}}
    )
    assert windows_below(config, 32) == {"sliding_window": 16}
    assert windows_below(config, 16) == {}
