"""Models that `get_peft_model` has wrapped, given as `model`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

from hwgrpo.errors import ConfigError
from hwgrpo.trl import GRPOConfig, GRPOTrainer
from tests.trl.small_trainer import SMALL, reward

ROWS = [{"prompt": f"say {i}"} for i in range(4)]
LORA: dict[str, Any] = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def wrapped_model(**fields: Any) -> Any:
    torch.manual_seed(0)
    return get_peft_model(AutoModelForCausalLM.from_pretrained("model"), LoraConfig(**(LORA | fields)))


def trained_model(**fields: Any) -> Any:
    """Return a wrapped model whose adapter adds something."""
    model = wrapped_model(**fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.02)
    return model


def trainer(model: Any, **changed: Any) -> GRPOTrainer:
    arguments = {
        "model": model,
        "reward_funcs": reward,
        "args": GRPOConfig("out", **SMALL, learning_rate=1e-2),
        "train_dataset": ROWS,
        "processing_class": AutoTokenizer.from_pretrained("model"),
    }
    return GRPOTrainer(**(arguments | changed))


def copies(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}


def test_a_new_adapter_is_the_peft_config_of_the_run(folder: Path):
    model = wrapped_model()
    before = copies(model)
    run = trainer(model)
    assert run.settings["model.lora.rank"] == 2
    assert run.settings["model.lora.alpha"] == 6.0
    assert run.settings["model.lora.target_modules"] == ["q_proj", "v_proj"]
    assert "model.lora.adapter" not in run.settings
    assert all(torch.equal(before[name], tensor) for name, tensor in copies(model).items())  # the object is as it was
    run.train()
    after = copies(model)
    assert any(torch.any(tensor) for name, tensor in after.items() if "lora_B" in name)  # trained in place, as in TRL
    written = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("model"), "out/final-adapter")
    assert all(torch.equal(after[name], tensor) for name, tensor in get_peft_model_state_dict(written).items())
    assert json.loads(Path("out/final-adapter/adapter_config.json").read_text())["base_model_name_or_path"] == "model"


def test_a_trained_adapter_continues(folder: Path):
    model = trained_model()
    before = copies(model)
    run = trainer(model, args=GRPOConfig("out", **SMALL, learning_rate=1e-2, beta=0.1))
    assert run.settings["model.lora.adapter"].startswith("out/objects/adapter-")
    assert isinstance(run.model, PeftModel)
    start = get_peft_model_state_dict(run.model)
    assert before.keys() == start.keys()
    assert all(torch.equal(before[name], tensor.cpu()) for name, tensor in start.items())
    run.train()
    assert run.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)  # to the adapter as it was given
    assert any(not torch.equal(before[name], tensor) for name, tensor in copies(model).items())


def test_the_same_adapter_is_written_to_the_same_folder(folder: Path):
    first, second = (trainer(trained_model(), args=GRPOConfig(name, **SMALL)) for name in ("one", "two"))
    names = [Path(each.settings["model.lora.adapter"]).name for each in (first, second)]
    assert names[0] == names[1]
    other = trainer(trained_model(lora_alpha=4), args=GRPOConfig("one", **SMALL))
    assert Path(other.settings["model.lora.adapter"]).name != names[0]


def test_what_a_run_cannot_continue_is_refused(folder: Path):
    with pytest.raises(ConfigError, match=r"has an adapter, and peft_config is given, too"):
        trainer(wrapped_model(), peft_config=LoraConfig(**LORA))
    with pytest.raises(ConfigError, match=r"bias='lora_only'"):
        trainer(trained_model(bias="lora_only"))
    with pytest.raises(ConfigError, match=r"peft_config.rank_pattern"):
        trainer(wrapped_model(rank_pattern={"q_proj": 1}))
    several = wrapped_model()
    several.add_adapter("other", LoraConfig(**LORA))
    with pytest.raises(ConfigError, match=r"has the adapters default, other; give a model with one adapter"):
        trainer(several)
