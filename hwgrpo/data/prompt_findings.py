"""What is odd about prompts that can be read: counted when they are, and said when a run starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hwgrpo.data.media import MARK
from hwgrpo.data.row_schema import Message, message_text

MARKED = "marked"
"""Kind of prompts whose text has the place of an image."""
CONTINUED, WRITTEN_OUT, ENDED, TWO_BEGINNINGS = "continued", "written_out", "ended", "two_beginnings"
"""Kinds of prompts that end with an assistant's message, are the text of a list of messages, end with the
end-of-sequence token, or begin with two beginning-of-sequence tokens."""
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


def finding_notes(name: str, findings: Mapping[str, int]) -> Iterator[str]:
    """Yield a note on each kind of prompts.

    Args:
        name: "training" or "validation"; "" where there is one kind.
        findings: kind -> prompts.
    """
    for kind, note in NOTES.items():
        if findings.get(kind):
            yield " ".join(filter(None, (f"{findings[kind]:,}", name, note)))
