"""Tokenizers of published models: their chat templates and tokens, as prompts are read and responses decoded."""

import json
from functools import cache, partial
from typing import Any

import pytest

from hwgrpo.agents.action import ToolCall
from hwgrpo.agents.call_formats import detect_call_format
from hwgrpo.catalog import CALL_FORMATS
from hwgrpo.config.schema import DataConfig, ModelConfig
from hwgrpo.data.chat_template import apply_template
from hwgrpo.data.prompts import build_dataset
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_tokenizer
from hwgrpo.rewards.response_text import ResponseDecoder
from hwgrpo.rollout.turn_template import Render, TurnTemplate
from tests.real import published
from tests.real.conftest import or_not_run
from tests.real.published import TOKENIZERS, tokenizer

QUESTION = "Wie viel ist 7 + 5? 答案。 🙂"
RESPONSE = "  Twelve (12),\n\tzwölf: 十二 🙂 3.14"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_conversation_becomes_the_tokens_of_its_template_and_a_response_its_text(name, tmp_path):
    folder = or_not_run(lambda: tokenizer(name))
    read = load_tokenizer(ModelConfig(path="builtin://tiny?task=sort", tokenizer=str(folder)))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": QUESTION}], "answer": "12"}) + "\n")
    config = DataConfig(train=str(path), instruction="Shortly.", template_date="2026-01-02")
    if read.chat_template is None:
        assert name == "gptoss"
        with pytest.raises(ConfigError, match=r"line 1.*no chat template; set model.chat_template"):
            build_dataset(config, read, "train")
        config.chat = "never"
    dataset = build_dataset(config, read, "train")
    assert dataset is not None
    prompt = dataset.prompt(0, 0)
    assert prompt.text.count(f"{QUESTION} Shortly.") == 1
    assert read.decode(list(prompt.token_ids)) == prompt.text
    if read.bos_token is not None and read.chat_template is not None:
        assert prompt.token_ids.count(read.bos_token_id) <= 1
    tokens = [*read(RESPONSE, add_special_tokens=False)["input_ids"], read.eos_token_id]
    assert ResponseDecoder(read, skip_special_tokens=False)(tokens) == RESPONSE


WITH_TEMPLATE = [name for name in TOKENIZERS if name != "gptoss"]
TOOL_TURNS = {
    "qwen3": "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3_1": "<|start_header_id|>tool<|end_header_id|>\n\n12<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "deepseek_v3": "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>12<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
}
"""What follows a turn that called a tool."""


@cache
def between_turns(name: str) -> tuple[Any, Render]:
    """Return a published tokenizer and its chat template."""
    folder = or_not_run(published.smollm2 if name == "smollm2" else lambda: tokenizer(name))
    read = load_tokenizer(ModelConfig(path="builtin://tiny?task=sort", tokenizer=str(folder)))
    config = DataConfig(template_date="2026-01-02")
    return read, partial(apply_template, config=config, tokenizer=read, place="here")


@pytest.mark.parametrize("name", [*WITH_TEMPLATE, "smollm2"])
def test_turns_are_the_tokens_of_the_whole_conversation(name):
    read, render = between_turns(name)
    conversation = [{"role": "user", "content": QUESTION}]

    def whole() -> list[int]:
        return read.encode(render(conversation, add_generation_prompt=True), add_special_tokens=False)

    # gemma3's end of a turn is not its end of sequence, but its generation config has it
    [end] = read.encode("<end_of_turn>" if name == "gemma3" else read.eos_token, add_special_tokens=False)
    between, tokens = TurnTemplate(render, read, [end]), whole()
    for turn in range(6):
        answer, question = f"Zwölf. 十二 🙂 {turn}", {"role": "user", "content": f"Und {turn} + 1?"}
        sampled = [*read.encode(answer, add_special_tokens=False), end]
        tokens += [*sampled, *between.between(sampled, True, [question])]
        conversation += [{"role": "assistant", "content": answer}, question]
        assert tokens == whole(), turn


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_the_result_of_a_tool_is_shown_as_the_template_shows_it(name):
    read, render = between_turns(name)
    between, result = (
        TurnTemplate(render, read, [read.eos_token_id]),
        [{"role": "tool", "name": "add", "content": "12"}],
    )
    if name == "gemma3":  # it has no role for tools
        with pytest.raises(ConfigError, match="give results as messages of the user"):
            between.between([read.eos_token_id], True, result)
    else:
        assert read.decode(between.between([read.eos_token_id], True, result)) == TOOL_TURNS[name]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_the_calls_of_a_template_are_read_back_from_its_tokens(name):
    read, _ = between_turns(name)
    calls = [ToolCall("look_up", {"city": "São Paulo 🙂", "days": 2}), ToolCall("run", {"code": 'print("a\\n")\n# }'})]
    as_text = name == "deepseek_v3"  # its template adds arguments to texts, and has no content beside calls
    messages = [
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": None if as_text else "Let me see.",
            "tool_calls": [
                {"type": "function", "function": {"name": each.name, "arguments": arguments}}
                for each in calls
                for arguments in [json.dumps(each.arguments) if as_text else each.arguments]
            ],
        },
    ]
    prompt = read.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    text = read.apply_chat_template(messages, tokenize=False).removeprefix(prompt)
    tokens = read.encode(text, add_special_tokens=False)
    tokens = tokens[: tokens.index(read.eos_token_id)]
    call_format = detect_call_format(read.chat_template)
    assert call_format == {"qwen3": "hermes", "deepseek_v3": "deepseek"}[name]
    turn = CALL_FORMATS.load(call_format)(read.decode(tokens))
    assert (turn.calls, turn.malformed) == (tuple(calls), ())
    assert turn.content == ("" if as_text else "Let me see.")


def test_templates_without_tools_have_no_call_format():
    for name in ("gemma3", "llama3_1", "smollm2"):
        assert detect_call_format(between_turns(name)[0].chat_template) is None
