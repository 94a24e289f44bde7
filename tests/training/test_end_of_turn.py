"""A chat template that ends messages with something that ends no response is named, with the setting that mends it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from tokenizers import AddedToken
from transformers import AutoConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from hwgrpo.config import Config
from hwgrpo.data.prompts import build_dataset
from hwgrpo.models.loading import load_generation_config, load_tokenizer
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.planning.dry_run import make_plan
from hwgrpo.rollout.stopping import end_token_ids
from hwgrpo.training.end_of_turn import end_of_turn_note
from hwgrpo.training.evaluate import build_evaluation
from hwgrpo.training.supervised.supervised_setup import open_examples
from tests.support.runs import runs

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}END{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TURN = "<|im_end|>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A chat model whose template ends a message with `<|im_end|>` and which knows `<eos>` alone as an end."""
    torch.set_num_threads(1)
    tokenizer = character_tokenizer("")
    tokenizer.add_tokens([AddedToken(TURN, special=True)])
    tokenizer.chat_template = TEMPLATE.replace("END", TURN + "\n")
    tokenizer.save_pretrained(tmp_path / "model")
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def settings(folder: Path, *words: str, prompt: Any = None) -> Config:
    rows = folder.parent / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": prompt or [{"role": "user", "content": "hi"}], "answer": "1"}) + "\n")
    common = (f"model.path={folder}", f"data.train={rows}", f"data.validation={rows}", "reward.functions=[exact_match]")
    return runs.small(folder.parent / "run", *common, "data.max_prompt_tokens=100", *words)


def note(folder: Path, *words: str, **row: Any) -> str | None:
    config = settings(folder, *words, **row)
    tokenizer = load_tokenizer(config.model)
    dataset = build_dataset(config.data, tokenizer, "train")
    return end_of_turn_note(config, AutoConfig.from_pretrained(folder), tokenizer, dataset, None)


def template(folder: Path, end: str) -> str:
    file = folder.parent / "template.jinja"
    file.write_text(TEMPLATE.replace("END", end))
    return f"model.chat_template={file}"


def test_a_token_that_ends_turns_and_no_response_is_named_with_the_setting_that_ends_them_there(folder):
    said = note(folder)
    turn = load_tokenizer(settings(folder).model).convert_tokens_to_ids(TURN)
    assert said is not None
    assert f"with the token '{TURN}' ({turn}), and responses end with '<eos>' (1) alone" in said
    assert f"rollout.stop_token_ids=[{turn}] ends them there" in said
    assert note(folder, f"rollout.stop_token_ids=[{turn}]") is None


def test_a_text_that_ends_turns_is_named_as_a_stop_string(folder):
    said = note(folder, template(folder, "\n### End\n"))
    assert said is not None
    assert "with the text '### End'" in said
    assert "rollout.stop=['### End'] ends them there" in said
    assert note(folder, template(folder, "\n### End\n"), "rollout.stop=['###']") is None


@pytest.mark.parametrize("end", ["<eos>", f"{TURN}\n<eos>", "", "\n"])
def test_a_template_that_ends_with_the_end_token_or_with_nothing_is_not_blamed(end, folder):
    assert note(folder, template(folder, end)) is None


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
def test_an_end_token_of_the_models_files_counts(place, folder):
    turn = load_tokenizer(settings(folder).model).convert_tokens_to_ids(TURN)
    if place == "generation_config.json":
        GenerationConfig(eos_token_id=[1, turn]).save_pretrained(folder)
    else:
        (folder / "generation_config.json").unlink()
        assert note(folder) is not None
        content = json.loads((folder / place).read_text())
        (folder / place).write_text(json.dumps(content | {"eos_token_id": [1, turn]}))
    assert note(folder) is None


def test_plain_text_and_a_template_of_other_roles_are_not_blamed(folder):
    assert note(folder, prompt="hi") is None
    assert note(folder, "data.chat=never") is None
    file = folder.parent / "system.jinja"
    refuses = "{% if messages[0].role != 'system' %}{{ raise_exception('a system message first') }}{% endif %}x"
    file.write_text(refuses)
    row = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert note(folder, f"model.chat_template={file}", prompt=row) is None


def test_run_dry_run_and_evaluation_say_it(folder, capsys):
    plan = make_plan(settings(folder), BACKEND, 1)
    evaluation = build_evaluation(settings(folder), BACKEND, 0)
    evaluation.rewards.close()
    assert any("rollout.stop_token_ids=[" in each for each in evaluation.notes)
    assert "rollout.stop_token_ids=[" in plan.text
    assert runs.run(folder.parent / "run", *words_of(folder), "observe.progress=plain", "trainer.max_steps=1")
    assert "rollout.stop_token_ids=[" in capsys.readouterr().out


def words_of(folder: Path) -> list[str]:
    rows = folder.parent / "rows.jsonl"
    return [
        *(f"model.path={folder}", f"data.train={rows}", f"data.validation={rows}", "reward.functions=[exact_match]"),
        *("data.max_prompt_tokens=100", "trainer.prompts_per_step=1"),
    ]


def test_fine_tuning_ends_responses_where_the_rollout_of_a_model_without_generation_config_does(folder):
    (folder / "generation_config.json").unlink()
    turn = load_tokenizer(settings(folder).model).convert_tokens_to_ids(TURN)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"eos_token_id": turn}))
    loaded = Qwen3ForCausalLM.from_pretrained(folder).generation_config
    config = settings(folder)
    tokenizer = load_tokenizer(config.model)
    read = load_generation_config(config.model)
    assert end_token_ids(tokenizer, read, ()) == end_token_ids(tokenizer, loaded, ()) == (1, turn)
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    file = folder.parent / "sft.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.data.train, config.data.validation = str(file), None
    assert open_examples(config).training.prompt(0, 0).response_ids[-1] == turn
