"""The sizes of a model are determined once for the same settings, and anew for others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hwgrpo.cli.chips import chosen_chips
from hwgrpo.config import load_config
from hwgrpo.config.schema import VISION_PARTS, LoraConfig, ModelConfig
from hwgrpo.planning import model_shape as subject
from hwgrpo.planning.model_shape import model_shape, planned_settings
from hwgrpo.planning.scale_plan import Cluster, plan_at_scale
from hwgrpo.planning.step_time import forward_work
from hwgrpo.training import vision_checks
from tests.support.models.tiny import tiny_qwen3


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that gets the class of each model that is made, of none at first."""
    found: list[str] = []
    plain = AutoModelForCausalLM.from_config

    def from_config(settings, **words):
        found.append(type(settings).__name__)
        return plain(settings, **words)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", from_config)
    monkeypatch.setattr(subject, "_known", {})
    return found


def test_a_model_is_made_once_for_the_same_settings(made: list[str]):
    config, settings = ModelConfig(path="unused", lora=LoraConfig(rank=2)), tiny_qwen3().config
    first = model_shape(config, settings)
    assert model_shape(ModelConfig(path="unused", lora=LoraConfig(rank=2)), tiny_qwen3().config) == first
    assert len(made) == 1


def test_other_settings_of_a_run_or_a_model_have_a_shape_of_their_own(made: list[str]):
    settings = tiny_qwen3().config
    full, adapted, wide = (
        model_shape(ModelConfig(path="unused", lora=LoraConfig(rank=r)), settings) for r in (0, 2, 4)
    )
    assert full.parameters == adapted.parameters == full.trainable
    assert 2 * adapted.trainable == wide.trainable
    settings.num_hidden_layers = 1
    settings.layer_types = ["full_attention"]
    assert model_shape(ModelConfig(path="unused", lora=LoraConfig(rank=0)), settings).parameters < full.parameters
    assert len(made) == 4


def test_an_adapter_that_was_replaced_by_one_of_another_rank_is_seen(made: list[str], tmp_path: Path):
    config = ModelConfig(path="unused", lora=LoraConfig(adapter=str(tmp_path)))
    trainable = []
    for rank in (2, 4):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank, "peft_type": "LORA"}))
        trainable.append(model_shape(config, tiny_qwen3().config).trainable)
    assert trainable[1] == 2 * trainable[0]
    assert len(made) == 2


def test_a_vision_language_models_tower_is_held_trained_by_its_setting_and_no_work_of_tokens():
    config = ModelConfig(path="Qwen/Qwen2.5-VL-7B-Instruct")
    settings, _ = planned_settings(config)
    text = ModelConfig(path="Qwen/Qwen2.5-7B-Instruct")
    text_settings, _ = planned_settings(text)
    shapes = {part: model_shape(replace(config, train_vision=part), settings) for part in VISION_PARTS}
    tower, merger = 631_975_680, 44_574_464  # 32 blocks and the patches' convolution; norm and two layers
    assert {shape.parameters for shape in shapes.values()} == {8_292_166_656}
    assert {shape.vision_parameters for shape in shapes.values()} == {tower + merger}
    assert shapes["none"].trainable == model_shape(text, text_settings).parameters
    assert shapes["projector"].trainable == shapes["none"].trainable + merger
    assert shapes["all"].trainable == shapes["all"].parameters
    adapted = replace(config, lora=LoraConfig(rank=2))
    with_adapters = model_shape(adapted, settings).trainable
    assert with_adapters == model_shape(replace(text, lora=LoraConfig(rank=2)), text_settings).trainable
    assert forward_work(config, settings) == forward_work(text, text_settings)


def test_a_decode_step_does_not_read_the_tower():
    words = ["rollout.engine=local", "model.lora.rank=32", "rollout.max_sequences=64"]
    seconds = {}
    for path in ("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"):
        config = load_config("qwen2_5_7b_gsm8k", [*words, f"model.path={path}"], data_may_be_missing=True)
        [chip] = plan_at_scale(config, Cluster(devices=1), chosen_chips(["H100 SXM"], config)).chips
        seconds[path] = chip.seconds["decode"]
        assert seconds[path] > 1
    assert len({*seconds.values()}) == 1


@pytest.mark.parametrize("able", [("local",), ("local", "vllm", "vllm_server")])
def test_auto_skips_engines_that_take_text_alone(able: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    plain = vision_checks.engine_kind

    def kind(rollout):
        return replace(plain(rollout), image_models=None if rollout.engine in able else frozenset())

    monkeypatch.setattr(vision_checks, "engine_kind", kind)
    config = load_config("qwen2_5_vl_7b_geo3k", data_may_be_missing=True)
    [chip] = plan_at_scale(config, Cluster(devices=8), chosen_chips(["H100 SXM"], config)).chips
    assert (chip.config.rollout.engine == "local") == (able == ("local",))
    assert any("does not take; use" in note for note in chip.engine_notes) == (able == ("local",))
