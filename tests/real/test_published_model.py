"""SmolLM2-135M-Instruct, a published chat model: it answers, trains a step with adapters, and its export answers."""

import json
from pathlib import Path

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device
from transformers import AutoModelForCausalLM, AutoTokenizer

from hwgrpo.cli.main import main
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.training.policy.layout_check import select_supported_layout
from hwgrpo.training.policy.layouts import GROUPED
from hwgrpo.training.shared_setup import load_trainable, policy_of
from tests.support.models.tiny import settings

QUESTION = "What is 7 + 5? Answer with the number only."
EASY = (
    "reasoning_gym://basic_arithmetic?size=16&seed=1&operators=+&allow_parentheses=false&format_style=natural"
    "&min_terms=2&max_terms=2&min_digits=1&max_digits=1"
)


def answer(folder: Path) -> str:
    """Return the greedy response of plain transformers to QUESTION."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_it_answers_a_question(smollm2, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"prompt": QUESTION, "answer": "12"}) + "\n")
    arguments = [
        "data.validation=rows.jsonl",
        "data.instruction=null",
        "data.few_shot=[]",
        "rollout.max_response_tokens=16",
        "reward.functions=[numeric]",
        "backend.name=cpu",
    ]
    assert main(["eval", "smollm2_135m_arithmetic", "--model", str(smollm2), "--n", "2", "--json", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["greedy_reward"] == 1
    assert "12" in answer(smollm2)


def test_a_step_of_its_recipe_trains_adapters_and_the_export_answers(smollm2, reasoning_gym_path, tmp_path, capfd):
    arguments = [
        *("smollm2_135m_arithmetic", f"model.path={smollm2}", f"trainer.output_dir={tmp_path / 'run'}"),
        *("trainer.max_steps=1", "trainer.prompts_per_step=2", "rollout.n=8", "data.validation_max_rows=2"),
        f"data.train={EASY}",
        # a few answers are right, and lengths differ: there is something to learn on any processor
        "reward.functions=[{name: reasoning_gym, kwargs: {extract: number}}, {name: length, weight: 0.1}]",
        *("backend.name=cpu", "trainer.threads=1", "observe.progress=none", "observe.loggers=[jsonl]"),
    ]
    assert main(["train", *arguments]) == 0, capfd.readouterr()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    [step] = [line for line in lines if "actor/grad_norm" in line]
    assert step["actor/grad_norm"] > 0
    assert 0 <= step["rewards/reasoning_gym/mean"] < 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert all(row["prompt"].count("Answer with the number only.<|im_end|>") == 3 for row in rows)
    assert (tmp_path / "run" / "final-adapter").is_dir()
    assert "12" in answer(tmp_path / "run" / "final")


@pytest.mark.parametrize("adapters", [True, False], ids=["lora", "full"])
def test_in_bf16_it_has_the_grouped_layout_and_the_lean_decode_step(smollm2, adapters):
    config = settings(f"model.path={smollm2}", "model.dtype=bfloat16", *["model.lora.rank=32"] * adapters)
    model = load_trainable(config, compute_dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.01)
    policy = policy_of(config, Device(BACKEND, 0), model, None)
    assert select_supported_layout(config, policy, GROUPED) == (GROUPED, None)
    engine = LocalEngine(
        policy.model,
        AutoTokenizer.from_pretrained(smollm2),
        device=torch.device("cpu"),
        compute_dtype=torch.bfloat16,
        max_sequences=4,
        longest=512,
    )
    assert engine.decode_path == "lean", engine.decode_reason
    assert not [note for note in engine.notes if "decoded one by one" in note]
