"""Prompts and responses under templates and tokenizers of the kinds that published chat models have."""

import re

import pytest

from hwgrpo.config.schema import DataConfig
from hwgrpo.data.chat_targets import chat_targets
from hwgrpo.data.chat_template import apply_template
from hwgrpo.data.inspection import Settings, inspect_files
from hwgrpo.data.prompts import build_dataset, dataset_notes
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.rollout.stopping import end_token_ids
from tests.support.models.byte_level import byte_level_tokenizer

TRIMS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n\n{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
)
"""As Llama 3's: white space around a message is removed."""
REASONS = (
    "{% for m in messages %}{% if m.role in ('user', 'system') %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% elif m.role == 'assistant' %}<|start|>assistant\n{% if '</think>' not in m.content %}<think>\n"
    "{{ m.reasoning_content | default('') }}\n</think>\n\n{% endif %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen 3's: messages without reasoning get an empty one, and unknown roles are left out."""
STRIPS = (
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
"""As DeepSeek R1's: reasoning is removed from messages."""
USER = {"role": "user", "content": "hi"}


def assistant(content: str, **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    ("template", "prompt", "kinds"),
    [
        (TRIMS, [USER], set()),
        (TRIMS, [{"role": "developer", "content": "be brief"}, USER], set()),
        (REASONS, [{"role": "developer", "content": "be brief"}, USER], {"left_out"}),
        (REASONS, [{"role": "system", "content": " be\nbrief "}, USER], set()),
        (TRIMS, [{"role": "user", "content": "what is <|end|>?"}], {"special"}),
        (TRIMS, [USER, assistant("yes<|end|>"), USER], {"special"}),
        (REASONS, [USER, assistant("The answer")], {"continued", "rewritten"}),
        (REASONS, [USER, assistant("<think>\nSo")], {"continued", "rewritten"}),
        (REASONS, [USER, assistant("<think>\nSo\n</think>\n\nThe")], {"continued"}),
        (REASONS, [USER, assistant("<think>\nSo\n</think>\n\nThe ")], {"continued", "space"}),
        (TRIMS, [USER, assistant("The answer is ")], {"continued"}),
        (TRIMS, "the answer is ", {"space"}),
        (TRIMS, "the answer is", set()),
        (TRIMS, "<|start|>user\n\nhi<|end|>", set()),
    ],
)
def test_what_template_and_tokenizer_make_of_a_prompt_is_counted_and_said(template, prompt, kinds, jsonl, data_config):
    tokenizer = byte_level_tokenizer(template)
    data = build_dataset(data_config(jsonl([{"prompt": prompt, "answer": "1"}])), tokenizer, "train")
    assert data is not None
    ended = {"ended"} if isinstance(prompt, str) and prompt.endswith("<|end|>") else set()
    assert set(data.findings) == kinds | ended
    notes = [note for note in dataset_notes("training", data) if "chat template is not" not in note]
    assert len(notes) == len(data.findings)


def test_a_space_at_the_end_is_no_finding_where_words_are_not_joined_to_it(jsonl, data_config, tokenizer):
    data = build_dataset(data_config(jsonl([{"prompt": "so ", "answer": "1"}])), tokenizer, "train")
    assert data is not None
    assert dict(data.findings) == {}


@pytest.mark.parametrize("content", ["", " \n"])
@pytest.mark.parametrize("template", [TRIMS, REASONS])
def test_an_empty_message_of_the_assistant_is_a_response_that_has_not_begun(template, content, jsonl, data_config):
    tokenizer = byte_level_tokenizer(template)
    rows = [{"prompt": [USER, assistant(content)]}, {"prompt": [USER]}]
    data = build_dataset(data_config(jsonl(rows)), tokenizer, "train")
    assert data is not None
    assert data.texts[0] == data.texts[1]


def test_inspect_counts_what_needs_the_tokenizer(jsonl):
    path = jsonl([{"prompt": [{"role": "developer", "content": "be brief"}, USER], "answer": "1"}] * 2)
    settings = Settings(DataConfig(train=""), None, byte_level_tokenizer(REASONS), 0)
    [file] = inspect_files([str(path)], settings).files
    assert file.findings == {"left_out": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_thinkng": False}, "enable_thinkng=false has no effect.* did you mean enable_thinking"),
        ({"x_y_z": 1}, "x_y_z=1 has no effect.* remove it"),
        ({"enable_thinking": "False"}, "enable_thinking='False' is text.* write false without quotes"),
    ],
)
def test_a_template_option_without_effect_is_an_error(options, message, data_config):
    config = data_config("unused", chat_template_kwargs=options)
    with pytest.raises(ConfigError, match=re.compile(rf"data\.chat_template_kwargs\.{message}", re.DOTALL)):
        apply_template([USER], config, byte_level_tokenizer(REASONS), "row 1", add_generation_prompt=True)


@pytest.mark.parametrize(("system", "remedy"), [("be brief", "leave data.system_prompt out, change"), (None, "change")])
def test_a_refused_conversation_has_a_remedy(system, remedy, jsonl, data_config):
    template = "{% if messages[0].role != 'user' or messages|length > 1 %}{{ raise_exception('no system') }}{% endif %}"
    rows = [{"prompt": [USER] if system else [USER, USER]}]
    with pytest.raises(DataError, match=rf"no system.*; {remedy} its messages, or set model.chat_template"):
        build_dataset(data_config(jsonl(rows), system_prompt=system), byte_level_tokenizer(template), "train")


def test_a_template_option_has_its_effect(data_config):
    config = data_config("unused", chat_template_kwargs={"enable_thinking": False})
    text = apply_template([USER], config, byte_level_tokenizer(REASONS), "row 1", add_generation_prompt=True)
    assert text.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("template", "answer", "part"),
    [
        (STRIPS, assistant("<think>\nwhy\n</think>\n\n5"), "content"),
        (TRIMS, assistant("5", reasoning_content="why"), "reasoning_content"),
        (REASONS, assistant("5", thinking="why"), "thinking"),
    ],
)
def test_reasoning_that_the_template_leaves_out_is_not_silently_untrained(template, answer, part, data_config):
    tokenizer = byte_level_tokenizer(template)
    with pytest.raises(DataError, match=rf"row 1: message 1 \(of the assistant\): .* leaves out a part of its {part}"):
        chat_targets([USER, answer], 0, data_config("unused"), tokenizer, end_token_ids(tokenizer, None, ()), "row 1")


@pytest.mark.parametrize(
    ("template", "messages", "trained"),
    [
        (REASONS, [USER, assistant("5", reasoning_content="why")], ["<think>\nwhy\n</think>\n\n5<|end|>"]),
        (TRIMS, [USER, assistant(" 5\n"), USER, assistant("6")], ["5<|end|>", "6<|end|>"]),
        (STRIPS, [USER, assistant("the a"), USER, assistant(" a")], ["the a<|end|>", " a<|end|>"]),
    ],
)
def test_the_tokens_that_are_trained_are_those_after_the_prompts_of_rollouts(template, messages, trained, data_config):
    tokenizer, config = byte_level_tokenizer(template), data_config("unused")
    targets = chat_targets(messages, 0, config, tokenizer, end_token_ids(tokenizer, None, ()), "row 1")
    text = apply_template(messages, config, tokenizer, "row 1", add_generation_prompt=False)
    assert text.startswith(str(tokenizer.decode(targets.ids)))
    prompt = apply_template(messages[:1], config, tokenizer, "row 1", add_generation_prompt=True)
    assert targets.ids[: targets.trained.index(True)] == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    runs = "".join("x" if each else " " for each in targets.trained)
    assert [tokenizer.decode(targets.ids[m.start() : m.end()]) for m in re.finditer("x+", runs)] == trained
