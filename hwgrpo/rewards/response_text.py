"""The text of responses that rewards and stop strings see, and the markers that a prompt leaves open for it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

MARKER = r"[<\[◁]\|?[A-Za-z][\w.-]*\|?[>\]▷]"
"""An opening marker: `<think>`, `[THINK]`, `<|thinking|>`, `◁think▷`."""
LAST_MARKERS = re.compile(rf"(?:{MARKER}\s{{0,9}})+\Z")
LONGEST_MARKERS = 400
"""Characters at a prompt's end in which markers are looked for."""


class ResponseDecoder:
    """Decodes response tokens to text.

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens: leave all special tokens out of the text, as verl and TRL do; False: only those of
            `wordless_ids`, so that markers such as `<think>` stay where a tokenizer has them as special tokens.
        end_ids: further ids that end a response.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool, end_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self.hidden = special_ids(tokenizer) if skip_special_tokens else wordless_ids(tokenizer) | set(end_ids)
        """Ids of tokens without text."""

    def __call__(self, tokens: Sequence[int]) -> str:
        """Return the text of response tokens."""
        shown = tokens if self._skips else [token for token in tokens if token not in self.hidden]
        text = self._tokenizer.decode(list(shown), skip_special_tokens=self._skips, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def wordless_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of end, padding, beginning and unknown, which say nothing."""
    ids = (getattr(tokenizer, f"{name}_token_id", None) for name in ("eos", "pad", "bos", "unk"))
    return frozenset(number for number in ids if number is not None)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids that `skip_special_tokens` leaves out of a text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}


def opened_markers(prompt_text: str) -> str:
    r"""Return the opening markers at the very end of a prompt, with the white space after each; "" without any.

    Chat templates of reasoning models end with `<think>\n`: the response then has the closing marker only. One that is
    closed again (`<think>\n\n</think>`) is not open.
    """
    found = LAST_MARKERS.search(prompt_text[-LONGEST_MARKERS:])
    return found[0] if found else ""


def continued(response: str, opened: str, names: Collection[str] | str) -> str:
    """Return a response behind those markers of its prompt's end that a rule names.

    Args:
        response: the response.
        opened: the markers, of `opened_markers`.
        names: the markers that the rule looks for, or the text of a pattern in which they stand.
    """
    for marker in re.finditer(MARKER, opened):
        if marker[0] in names or (isinstance(names, str) and re.escape(marker[0]) in names):
            return opened[marker.start() :] + response
    return response
