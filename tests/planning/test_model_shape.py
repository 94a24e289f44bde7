"""The sizes of a model are determined once for the same settings, and anew for others."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hwgrpo.config.schema import LoraConfig, ModelConfig
from hwgrpo.planning import model_shape as subject
from hwgrpo.planning.model_shape import model_shape
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
