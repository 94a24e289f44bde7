"""TRL scripts run on the CPU, unchanged but for the import."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.trl.tiny_chat_model import save_chat_model

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_chat_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)

    def run_script(name: str) -> dict[str, Any]:
        return runpy.run_path(str(SCRIPTS / name), run_name="__main__")

    return run_script


def history(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def test_the_scripts_differ_from_trls_in_one_import():
    for script in SCRIPTS.glob("*.py"):
        assert re.findall(r".*hwgrpo.*", script.read_text()) == ["from hwgrpo.trl import GRPOConfig, GRPOTrainer"]


def test_a_plain_script(run: Any):
    names = run("plain_script.py")
    trainer, result = names["trainer"], names["result"]
    assert result.global_step == trainer.state.global_step == 2
    assert len(history(trainer, "loss")) == 2
    assert history(trainer, "epoch")[:2] == [0.125, 0.25]
    assert set(history(trainer, "learning_rate")) == {1e-3, 5e-4}
    last = trainer.state.log_history[-2]
    for key in ("reward", "reward_std", "rewards/reward_len/mean", "completions/mean_length", "num_tokens", "entropy"):
        assert key in last
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(result.training_loss)
    lengths = last["completions/mean_length"]
    assert lengths <= 8
    assert (Path("plain-model") / "config.json").is_file()
    records = [json.loads(line) for line in Path("plain/completions.jsonl").read_text().splitlines()]
    assert records[0]["reward"] == -abs(5 - len(records[0]["response"]))


def test_a_peft_script(run: Any):
    names = run("peft_script.py")
    trainer = names["trainer"]
    config = trainer.settings
    assert (config["model.lora.rank"], config["model.lora.alpha"]) == (4, 8.0)
    assert config["model.lora.target_modules"] == ["q_proj", "v_proj"]
    assert names["result"].global_step == 3  # 6 prompts, 2 a step
    assert history(trainer, "kl")
    assert json.loads(Path("peft/adapter_config.json").read_text())["r"] == 4
    assert (Path("peft/final") / "model.safetensors").is_file()


def test_a_script_with_weights(run: Any):
    names = run("weights_script.py")
    trainer = names["trainer"]
    first = trainer.state.log_history[0]
    scored = first["rewards/letters/mean"]
    # half of the responses have no letters reward, which adds 0 to their sum
    expected = 0.5 * first["rewards/length/mean"] + 2.0 * scored / 2
    assert first["reward"] == pytest.approx(expected)
    assert first["kinds"] == 2
    assert names["seen"] == [0, 1]
    assert not any("scored" in key for key in first)


def test_a_script_with_evaluation_and_callbacks(run: Any):
    names = run("evaluation_script.py")
    events = names["events"]
    assert events[0] == ("begin", 6, True)
    own = ["eval_reward", "eval_reward_best", "eval_reward_greedy", "eval_rewards/short/mean"]
    assert events[-1] == ("evaluate", 3, own)
    assert ("save", 1) in events
    assert ("save", 2) not in events
    assert {each.name for each in Path("evaluation/checkpoints").iterdir()} == {"step-00000001", "step-00000003"}
    assert [each[1] for each in events if each[0] == "step"] == [1, 2, 3]
    assert [each[1] for each in events if each[0] == "log" and each[2]] == [1, 2]
    assert [each[1] for each in events if each[0] == "evaluate"] == [1, 2, 3]
    [evaluated] = [each for each in events if each[0] == "evaluate" and each[1] == 2]
    assert {"eval_reward", "eval_first_reward", "eval_second_reward"} <= {*evaluated[2]}
    assert ("end", 3) in events
    assert names["metrics"]["eval_reward"] <= 0
    assert names["result"].global_step == 3


def test_a_conversational_script(run: Any):
    names = run("conversation_script.py")
    assert names["prompts_seen"][0][0] == {"role": "system", "content": "Be brief."}
    assert len(names["trainer"].state.log_history) == 3
    assert set(history(names["trainer"], "learning_rate")) == {1e-3}
