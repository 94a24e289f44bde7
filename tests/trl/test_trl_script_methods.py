"""What scripts read of a GRPOTrainer beside training: the accelerator, callbacks, rows, model card, adapters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hwgrpo.errors import ConfigError
from hwgrpo.trl import GRPOConfig, GRPOTrainer
from hwgrpo.trl.model_card import model_card
from tests.trl.small_trainer import SMALL, reward

ROWS = [{"prompt": f"say {i}"} for i in range(5)]
ARGUMENTS = {**SMALL, "per_device_train_batch_size": 8}


def trainer(**changed: Any) -> GRPOTrainer:
    arguments = {
        "model": "model",
        "reward_funcs": reward,
        "args": GRPOConfig("out", **ARGUMENTS),
        "train_dataset": ROWS,
    }
    return GRPOTrainer(**(arguments | changed))


def test_adapters_name_the_model_as_it_was_given(folder: Path):
    tokenizer = AutoTokenizer.from_pretrained("model")
    run = trainer(
        model=AutoModelForCausalLM.from_pretrained("model"),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
    )
    assert isinstance(run.model, PeftModel)  # before training
    run.train()
    run.save_model("adapter")
    for written in ("adapter", "out/final-adapter"):
        assert json.loads(Path(written, "adapter_config.json").read_text())["base_model_name_or_path"] == "model"
        assert "objects" not in Path(written, "README.md").read_text()
    assert "objects" in run.model.peft_config["default"].base_model_name_or_path  # where the run loads it from


def test_the_accelerator_of_one_process(folder: Path):
    run = trainer()
    accelerator = run.accelerator
    assert (accelerator.is_main_process, accelerator.num_processes, accelerator.process_index) == (True, 1, 0)
    assert accelerator.device == torch.device("cpu")
    assert accelerator.state.is_local_main_process
    accelerator.wait_for_everyone()
    with pytest.raises(AttributeError, match=r"accelerator.backward of accelerate.*there are: .*wait_for_everyone"):
        accelerator.backward()
    assert not run.is_fsdp_enabled
    assert not run.is_deepspeed_enabled
    assert run.args.parallel_mode.value == "not_parallel"


def test_the_accelerator_of_several_processes(folder: Path, monkeypatch: pytest.MonkeyPatch):
    run = trainer()
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    accelerator = run.accelerator
    assert (accelerator.is_main_process, accelerator.num_processes, accelerator.process_index) == (False, 2, 1)
    assert accelerator.is_last_process
    assert run.args.parallel_mode.value == "distributed"
    with pytest.raises(ConfigError, match=r"the ranks are connected while a run is open"):
        accelerator.wait_for_everyone()
    waited: list[bool] = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.barrier", lambda: waited.append(True))
    accelerator.wait_for_everyone()
    assert waited == [True]


class Nothing(TrainerCallback):
    pass


def test_callbacks_and_rows(folder: Path):
    run = trainer(callbacks=[Nothing])
    assert [type(each) for each in run.callback_handler.callbacks] == [Nothing]
    assert run.callback_handler.callback_list == "Nothing"
    run.callback_handler.remove_callback(Nothing)
    assert run.callback_handler.callbacks == []
    assert [len(batch) for batch in run.get_train_dataloader()] == [2, 2, 1]
    assert next(iter(run.get_eval_dataloader(ROWS[:1]))) == ROWS[:1]
    with pytest.raises(ConfigError, match=r"give eval_dataset"):
        run.get_eval_dataloader()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("optimizer", "set optim"),
        ("lr_scheduler", "lr_scheduler_type"),
        ("ref_model", "beta"),
        ("other", "from-trl.md"),
    ],
)
def test_what_there_is_not_says_what_to_do(folder: Path, name: str, remedy: str):
    with pytest.raises(AttributeError, match=rf"GRPOTrainer.{name} of TRL has no counterpart here; .*{remedy}"):
        getattr(trainer(), name)


def test_the_model_card(folder: Path):
    trainer().create_model_card("mine", "a/rows", ["x"])
    card = ModelCard.load("out/README.md")
    assert card.data.base_model is None  # a folder is not on the hub
    assert card.data.datasets == "a/rows"
    assert {"grpo", "hwgrpo", "x"} <= {*card.data.tags}
    assert "# mine" in card.text
    assert "| `rollout.max_response_tokens` | `4` |" in card.text
    text = model_card("m", "a/b", None, [], {"trainer.output_dir": "secret", "optim.lr": 1e-6})
    assert ModelCard(text).data.base_model == "a/b"
    assert "[a/b](https://huggingface.co/a/b), trained by GRPO" in text
    assert "secret" not in text


def test_pushing_to_the_hub_names_the_commands(folder: Path, capsys: pytest.CaptureFixture[str]):
    run = trainer(args=GRPOConfig("out", **ARGUMENTS, push_to_hub=True, hub_model_id="me/mine"))
    assert "push_to_hub=true: nothing is pushed to the hub: run hwgrpo export" in capsys.readouterr().err
    run.push_to_hub(dataset_name="rows")
    assert "run hwgrpo export out FOLDER, then hf upload me/mine FOLDER" in capsys.readouterr().err
    adapted = trainer(peft_config=LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.push_to_hub()
    assert "run hwgrpo export --adapter out FOLDER, then hf upload out FOLDER" in capsys.readouterr().err
