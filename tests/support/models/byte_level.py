"""A tiny byte-level BPE tokenizer, of the kind that published chat models have."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MERGES = (("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "a"), ("Ġ", "1"), ("Ċ", "Ċ"))
END, START = "<|end|>", "<|start|>"


def byte_level_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the 256 bytes and a few merges; `<|end|>` ends, `<|start|>` and `<think>` are added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in MERGES)]
    core = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, list(MERGES)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(END, special=True), AddedToken(START, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END)
    tokenizer.chat_template = chat_template
    return tokenizer


def save_with_class(tokenizer: PreTrainedTokenizerFast, folder: Path, name: str) -> None:
    """Write a tokenizer whose tokenizer_config.json names another class, as published folders do."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": name}))
