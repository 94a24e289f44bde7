"""Tokenizers whose configuration names a class that does not read their tokenizer.json."""

import pytest
from transformers import AutoTokenizer

from hwgrpo.config.schema import ModelConfig
from hwgrpo.models.loading import load_tokenizer
from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.rewards.models.pretrained import Pretrained
from tests.support.models.byte_level import byte_level_tokenizer, save_with_class

TEXT = "What is 7 + 5?\n\n  the naïve 日本 😀"


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "GemmaTokenizerFast"])
def test_the_tokens_are_those_of_tokenizer_json_whatever_class_is_named(tmp_path, name):
    save_with_class(byte_level_tokenizer(), tmp_path, name)
    assert type(AutoTokenizer.from_pretrained(tmp_path)).__name__ == name.removesuffix("Fast")
    (tmp_path / "config.json").write_text("{}")
    for tokenizer in (
        load_tokenizer(ModelConfig(path="unused", tokenizer=str(tmp_path))),
        Pretrained(Kwargs("reward_model"), str(tmp_path), None, False).tokenizer(),
    ):
        ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        assert ids == byte_level_tokenizer()(TEXT)["input_ids"]
        assert tokenizer.decode(ids) == TEXT
        assert tokenizer.eos_token == "<|end|>"


def test_a_class_that_agrees_with_its_file_is_kept(tmp_path):
    save_with_class(byte_level_tokenizer(), tmp_path, "GPT2TokenizerFast")
    assert type(load_tokenizer(ModelConfig(path="unused", tokenizer=str(tmp_path)))).__name__ == "GPT2Tokenizer"
