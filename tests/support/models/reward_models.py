"""Tiny reward models with tokenizers, saved as folders that a run loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
)

from tests.support.models.tiny import sharpened

SEPARATOR = "<extra_0>"
SPECIAL = ("<unk>", "<pad>", "<eos>", SEPARATOR)
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
CHAT_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
MODELS: dict[str, Any] = {
    "decoder": Qwen3ForSequenceClassification,
    "decoder of tokens": Qwen3ForTokenClassification,
    "language model": Qwen3ForCausalLM,
    "encoder": BertForSequenceClassification,
    "encoder of tokens": BertForTokenClassification,
}


def character_tokenizer(*, pad: bool = True, chat: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters, with a separator token."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([SEPARATOR])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>" if pad else None
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def save_reward_model(
    folder: Path,
    kind: str,
    *,
    labels: int = 1,
    pad: bool = True,
    model_pad: bool = True,
    chat: bool = False,
    positions: int = 256,
    head: int = 8,
    seed: int = 0,
) -> Any:
    """Write a random model of a kind in `MODELS` with its tokenizer to a folder; return the model.

    Args:
        folder: where it goes.
        kind: one of `MODELS`.
        labels: number of labels.
        pad: whether the tokenizer has a padding token.
        model_pad: whether the model's configuration names it.
        chat: whether the tokenizer has a chat template.
        positions: most tokens that the model reads.
        head: size of a decoder's attention heads.
        seed: of its weights.
    """
    tokenizer = character_tokenizer(pad=pad, chat=chat)
    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": positions,
        "pad_token_id": tokenizer.convert_tokens_to_ids("<pad>") if model_pad else None,
    }
    if kind != "language model":
        common["num_labels"] = labels
    if "encoder" in kind:
        config: Any = BertConfig(**common)
    else:
        config = Qwen3Config(**common, num_key_value_heads=2, head_dim=head)
    model = sharpened(MODELS[kind](config)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
