"""Open a tokenizer as its `tokenizer.json` defines it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend
from transformers.utils import cached_file

FILE = "tokenizer.json"
PROBES = (
    "What is 7 + 5? Don't say 12,345.678!",
    "def f(x):\n    return  x\t# naïve\r\n\n",
    "\\frac{1}{2} <tag> 日本語 😀",
)
"""Texts whose tokens show a tokenizer's white space, numbers, punctuation, and characters beyond ASCII."""


def pretrained_tokenizer(source: str, **options: Any) -> PreTrainedTokenizerBase:
    """Open the tokenizer of a folder or a hub name.

    A class that `tokenizer_config.json` names may build its own pre-tokenizer instead of reading the one of
    `tokenizer.json`: `LlamaTokenizerFast`, which DeepSeek's folders name, loses every space of a byte-level vocabulary.
    Where its tokens are not those of `tokenizer.json`, the file is read as it is.

    Args:
        source: folder or hub name.
        options: of `AutoTokenizer.from_pretrained`.

    Raises:
        OSError, ValueError: the tokenizer cannot be found or read.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(source, **options)
    if type(tokenizer) is TokenizersBackend or not tokenizer.is_fast or not _is_of_transformers(tokenizer):
        return tokenizer
    found = {name: value for name, value in options.items() if name in ("revision", "local_files_only")}
    file = cached_file(source, FILE, _raise_exceptions_for_missing_entries=False, **found)
    if file is None or _agrees_with_file(tokenizer, Path(file)):
        return tokenizer
    return TokenizersBackend.from_pretrained(source, **options)


def _is_of_transformers(tokenizer: Any) -> bool:
    return type(tokenizer).__module__.startswith("transformers.")


def _agrees_with_file(tokenizer: Any, file: Path) -> bool:
    """Return whether a tokenizer has the tokens of its file for the probes."""
    stored = Tokenizer.from_file(str(file))
    try:
        encoded = tokenizer(list(PROBES), add_special_tokens=False)["input_ids"]
    except Exception:  # tokenizers raises no narrower one, as for an unknown token that the vocabulary lacks
        return False
    return encoded == [each.ids for each in stored.encode_batch(list(PROBES), add_special_tokens=False)]
