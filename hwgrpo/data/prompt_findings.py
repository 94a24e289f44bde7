"""What is odd about prompts that can be read: counted when they are, and said when a run starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from hwgrpo.data.media import MARK
from hwgrpo.data.row_schema import Message, message_parts, message_text
from hwgrpo.rewards.response_text import special_ids, wordless_ids

MARKED = "marked"
"""Kind of prompts whose text has the place of an image."""
CONTINUED, WRITTEN_OUT, ENDED, TWO_BEGINNINGS = "continued", "written_out", "ended", "two_beginnings"
"""Kinds of prompts that end with an assistant's message, are the text of a list of messages, end with the
end-of-sequence token, or begin with two beginning-of-sequence tokens."""
LEFT_OUT, SPECIAL, SPACE, REWRITTEN = "left_out", "special", "space", "rewritten"
"""Kinds of prompts of which the chat template writes a message not at all, that have the text of a special token, that
end with a space which the tokenizer joins to words, or whose last message the chat template begins otherwise."""
BY_TOKENIZER = frozenset({ENDED, TWO_BEGINNINGS, LEFT_OUT, SPECIAL, SPACE, REWRITTEN})
"""Kinds that are seen with a tokenizer alone."""
LIST_OF_MESSAGES = re.compile(r"""\s*\[?\s*\{\s*['"](role|content)['"]\s*:""")
NOTES: Mapping[str, str] = {
    MARKED: "prompts have the mark of an image, video or sound in their text (<image>), and none is shown to the "
    "model: the mark is read as text. Leave out rows that are not complete without",
    CONTINUED: "prompts end with a message of the assistant, which the response continues; leave the message out where "
    "it is the answer",
    WRITTEN_OUT: "prompts are a list of chat messages written as text, which is passed on as text; write the column as "
    "a list, in .jsonl or .parquet, for a conversation",
    ENDED: "prompts end with the tokenizer's end-of-sequence token, after which a model begins anew: take it out of "
    "the text or of the chat template (model.chat_template), or, where the tokenizer adds it, set add_eos_token to "
    "false in its tokenizer_config.json (model.tokenizer)",
    TWO_BEGINNINGS: "prompts begin with two beginning-of-sequence tokens: take it out of the text, to which the "
    "tokenizer adds its own, or out of the chat template (model.chat_template)",
    LEFT_OUT: "prompts have a message of the user or the system that the chat template leaves out, as of a role that "
    "it does not know: give it another role, or set model.chat_template to a file with a template that writes it",
    SPECIAL: "prompts have the text of a special token in a message, as of a turn's end, which becomes that token: "
    "take it out where it is text",
    SPACE: "prompts end with a space, which this tokenizer joins to the word that follows: the response begins in a "
    "way that the model has hardly seen. Take the space out",
    REWRITTEN: "prompts end with a message of the assistant that the chat template begins otherwise than a response, "
    "as with empty reasoning before it: for another beginning write the prompt as text, special tokens included",
}
"""Kind -> what a run says of its prompts, after their number."""


def findings_of(prompt: str | Sequence[Message]) -> Iterator[str]:
    """Yield the kinds of a prompt, text or messages."""
    texts = [prompt] if isinstance(prompt, str) else map(message_text, prompt)
    if any(MARK.search(text) for text in texts):
        yield MARKED
    if isinstance(prompt, str):
        if LIST_OF_MESSAGES.match(prompt):
            yield WRITTEN_OUT
    elif prompt[-1]["role"] == "assistant":
        yield CONTINUED


def token_findings(ids: Sequence[int], tokenizer: Any) -> Iterator[str]:
    """Yield the kinds of a prompt by its tokens."""
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        yield ENDED
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        yield TWO_BEGINNINGS


def template_findings(messages: Sequence[Message], text: str, tokenizer: Any) -> Iterator[str]:
    """Yield the kinds of a conversation by what the chat template has made of it."""
    written = without_space(text)
    if any(
        without_space(part) not in written
        for message in messages
        if message["role"] not in ("assistant", "tool")
        for part in message_parts(message)
    ):
        yield LEFT_OUT
    patterns = (_special_text(tokenizer, message["role"] == "assistant") for message in messages)
    if any(pattern.search(message_text(message)) for pattern, message in zip(patterns, messages, strict=True)):
        yield SPECIAL


def open_end_findings(text: str, tokenizer: Any) -> Iterator[str]:
    """Yield the kinds of a text that the response continues within a line."""
    if text.endswith(" ") and _joins_space(tokenizer):
        yield SPACE


def without_space(text: str) -> str:
    """Return a text without its white space, which templates trim and add."""
    return "".join(text.split())


@lru_cache(maxsize=8)
def _special_text(tokenizer: Any, answers: bool) -> re.Pattern[str]:
    """Return a pattern of the special tokens' text; of those that end or pad alone for an assistant's messages."""
    ids = (wordless_ids(tokenizer) if answers else special_ids(tokenizer)) - {tokenizer.unk_token_id}
    texts = tokenizer.convert_ids_to_tokens(sorted(ids))
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


@lru_cache(maxsize=8)
def _joins_space(tokenizer: Any) -> bool:
    """Return whether a word and the space before it are one token."""
    word, joined = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a", "a a"))
    return len(word) == 1 and len(joined) == 2


def finding_notes(name: str, findings: Mapping[str, int]) -> Iterator[str]:
    """Yield a note on each kind of prompts.

    Args:
        name: "training" or "validation"; "" where there is one kind.
        findings: kind -> prompts.
    """
    for kind, note in NOTES.items():
        if findings.get(kind):
            yield " ".join(filter(None, (f"{findings[kind]:,}", name, note)))
