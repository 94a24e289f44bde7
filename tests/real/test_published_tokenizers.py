"""Tokenizers of published models: their chat templates and tokens, as prompts are read and responses decoded."""

import json

import pytest

from hwgrpo.config.schema import DataConfig, ModelConfig
from hwgrpo.data.prompts import build_dataset
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_tokenizer
from hwgrpo.rewards.response_text import ResponseDecoder
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
