"""Interrupted, resumed and finished runs of a TRL script: the same object, the state, what scripts look for, errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.trl import GRPOConfig, GRPOTrainer
from hwgrpo.trl.trl_errors import in_trl_names
from tests.trl.small_trainer import SMALL, reward

ROWS = [{"prompt": f"say {i}"} for i in range(4)]
ARGUMENTS = {**SMALL, "max_steps": 3, "save_steps": 1, "logging_steps": 1}


def trainer(output: str = "out", callbacks: Any = None, **changed: Any) -> GRPOTrainer:
    return GRPOTrainer("model", reward, GRPOConfig(output, **{**ARGUMENTS, **changed}), ROWS, callbacks=callbacks)


class Interrupt(TrainerCallback):
    """Interrupts at each number of updates once."""

    def __init__(self, *updates: int) -> None:
        self.left = [*updates]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in self.left:
            self.left.remove(state.global_step)
            raise KeyboardInterrupt


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


def test_an_interrupted_object_resumes(folder: Path):
    run = trainer(callbacks=[Interrupt(2, 3)])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    with pytest.raises(ConfigError, match=r"train\(resume_from_checkpoint=True\)"):
        run.train()
    with pytest.raises(KeyboardInterrupt):
        run.train(resume_from_checkpoint=True)
    assert run.train(resume_from_checkpoint=True).global_step == 3


@pytest.mark.parametrize("by_folder", [False, True], ids=["newest", "by folder"])
def test_the_history_and_the_tokens_continue(folder: Path, by_folder: bool):
    whole = trainer("whole")
    whole.train()
    trainer(callbacks=[Stop], save_steps=3).train()  # the stop itself saves
    assert get_last_checkpoint("out") == "out/checkpoint-1"
    run = trainer()
    run.train(resume_from_checkpoint="out/checkpoint-1" if by_folder else True)
    for key in ("num_tokens", "reward", "loss"):
        values = [[entry[key] for entry in each.state.log_history if key in entry] for each in (whole, run)]
        assert values[0] == values[1]
        assert len(values[0]) == 3
    assert run.state.num_input_tokens_seen == whole.state.num_input_tokens_seen
    assert get_last_checkpoint("out") == "out/checkpoint-3"
    finished = trainer()
    finished.train(resume_from_checkpoint=True)
    assert finished.state.num_input_tokens_seen == whole.state.num_input_tokens_seen


def test_a_checkpoint_that_is_gone_is_replaced_by_the_newest(folder: Path, capsys: pytest.CaptureFixture[str]):
    trainer(callbacks=[Stop]).train()
    pointer = folder / "out/checkpoint-2"
    pointer.mkdir()
    (pointer / "checkpoint.txt").write_text("../checkpoints/step-00000002\n")
    assert trainer().train(resume_from_checkpoint=str(pointer)).global_step == 3
    assert "is not there; the newest one is used" in capsys.readouterr().err


class OnSave(TrainerCallback):
    """Loads what is saved."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
        stored = json.loads((checkpoint / "trainer_state.json").read_text())
        assert AutoModelForCausalLM.from_pretrained(checkpoint).config.model_type == "qwen3"
        assert (Path(args.output_dir) / "checkpoints" / f"step-{state.global_step:08d}").is_dir()
        self.found.append(stored["global_step"])


def test_on_save_finds_the_checkpoint(folder: Path):
    callback = OnSave()
    kept = folder / "out/checkpoint-7"  # of TRL
    kept.mkdir(parents=True)
    (kept / "trainer_state.json").write_text("{}")
    trainer(callbacks=[callback], save_total_limit=1).train()
    assert callback.found == [1, 2, 3]
    assert kept.is_dir()
    assert not (folder / "out/checkpoint-1").exists()
    trainer("other").train()
    files = {each.name for each in (folder / "other/checkpoint-3").iterdir()}
    assert files == {"checkpoint.txt", "trainer_state.json"}


def test_what_a_finished_run_gives_and_says(folder: Path):
    trainer().train()
    run = trainer()
    assert run.train(resume_from_checkpoint=True).global_step == 3
    run.save_model("copy")
    assert (folder / "copy/model.safetensors").read_bytes() == (folder / "out/final/model.safetensors").read_bytes()
    for use in (lambda: run.model, lambda: run.evaluate(ROWS[:1])):
        with pytest.raises(RunError, match=r"output_dir='out' is finished.*out/final.*larger max_steps"):
            use()
    with pytest.raises(ConfigError, match=r"learning_rate 1e-06 -> 0.1;.* set output_dir to") as caught:
        trainer(learning_rate=0.1).train(resume_from_checkpoint=True)
    assert "trainer." not in str(caught.value)
    assert "allow-finished" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint=.*nowhere") as caught:
        trainer("other").train(resume_from_checkpoint="nowhere")
    assert "trainer." not in str(caught.value)


def test_names_in_errors():
    text = "trainer.output_dir='o': use trainer.resume=auto; optim.lr. rollout.n model.lora.rank"
    expected = "output_dir='o': use train(resume_from_checkpoint=True); learning_rate. num_generations peft_config"
    assert in_trl_names(text) == expected
