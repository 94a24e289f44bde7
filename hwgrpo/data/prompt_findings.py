"""What is odd about prompts that can be read: counted when they are, and said when a run starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hwgrpo.data.media import MARK
from hwgrpo.data.row_schema import Message, message_text

MARKED = "marked"
"""Kind of prompts whose text has the place of an image."""
NOTES: Mapping[str, str] = {
    MARKED: "prompts have the mark of an image, video or sound in their text (<image>), and none is shown to the "
    "model: the mark is read as text. Leave out rows that are not complete without",
}
"""Kind -> what a run says of its prompts, after their number."""


def findings_of(prompt: str | Sequence[Message]) -> Iterator[str]:
    """Yield the kinds of a prompt, text or messages."""
    texts = [prompt] if isinstance(prompt, str) else map(message_text, prompt)
    if any(MARK.search(text) for text in texts):
        yield MARKED


def finding_notes(name: str, findings: Mapping[str, int]) -> Iterator[str]:
    """Yield a note on each kind of prompts.

    Args:
        name: "training" or "validation"; "" where there is one kind.
        findings: kind -> prompts.
    """
    for kind, note in NOTES.items():
        if findings.get(kind):
            yield " ".join(filter(None, (f"{findings[kind]:,}", name, note)))
