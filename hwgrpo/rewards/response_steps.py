"""Steps of a response: where they end in its text, and with which of its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from hwgrpo import user_code
from hwgrpo.errors import RewardError, quoted
from hwgrpo.response_text import ResponseDecoder
from hwgrpo.user_code import describe_error

INCOMPLETE = "\ufffd"
"""What tokenizers decode the bytes of an incomplete character to."""


class StepFinder:
    """Finds the steps of responses as `algorithm.process` says.

    Args:
        config: the section `algorithm.process` (`ProcessConfig`).
        tokenizer: the one that decodes the responses.
        skip_special_tokens: as the responses were decoded.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, config: Any, tokenizer: Any, skip_special_tokens: bool = False) -> None:
        self._decode = ResponseDecoder(tokenizer, skip_special_tokens)
        self._function: Callable[[str], Any] | None = None
        self._name = config.function
        if config.function is not None:
            self._function = user_code.load_function(config.function, "algorithm.process.function")
        self._pattern = re.compile(config.pattern or re.escape(config.delimiter))

    def ends(self, text: str) -> list[int]:
        """Return the characters after which the steps of a response end, ascending; the last is its length.

        A response has at least one step. What is only white space between two delimiters belongs to the step before.

        Raises:
            RewardError: the user's function fails, or returned other than ascending positions in the text.
        """
        if self._function is None:
            return separated(text, self._pattern)
        try:
            found = [int(end) for end in self._function(text)]
        except Exception as error:
            raise RewardError(f"algorithm.process.function={self._name!r} {describe_error(error)}") from error
        if any(not low < high for low, high in zip([0, *found], [*found, len(text) + 1], strict=True)):
            raise RewardError(
                f"algorithm.process.function={self._name!r} must return the ascending ends of steps in a text of "
                f"{len(text)} characters, from 1 to {len(text)}; it returned {quoted(found, 200)}"
            )
        return [*found[:-1], len(text)] if found else [len(text)]

    def token_ends(self, text: str, tokens: Sequence[int]) -> list[int]:
        """Return the index of the last token of each step of `ends(text)`, not descending; -1 without tokens."""
        return last_tokens(self.ends(text), tokens, self._decode)


def separated(text: str, delimiter: re.Pattern[str]) -> list[int]:
    """Return the ends of the steps between the matches of a delimiter, which belongs to the step before it."""
    ends: list[int] = []
    start = 0
    for match in delimiter.finditer(text):
        if text[start : match.start()].strip():
            ends.append(match.end())
        elif ends:
            ends[-1] = match.end()
        start = match.end()
    if text[start:].strip() or not ends:
        return [*ends, len(text)]
    return [*ends[:-1], len(text)]


def last_tokens(ends: Sequence[int], tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return for each step the index of the token that completes its last character; the last step has the last token.

    A character may be spread over several tokens (byte-level BPE), and a token may end a step and begin the next: it
    then belongs to the step that it ends. Text is decoded from a token that follows a complete character, with one
    token before what is measured, since some tokenizers decode the first token without its space.

    Args:
        ends: characters after which the steps end, ascending.
        tokens: the response.
        decode: tokens -> text.
    """

    def complete(first: int, stop: int) -> int:
        return len(decode(tokens[first:stop]).rstrip(INCOMPLETE))

    found: list[int] = []
    first, before, low = 0, 0, 0  # `before`: characters of the response minus those decoded from `first`
    for end in ends[:-1]:
        width, high = 1, max(low, 1)
        while high < len(tokens) and before + complete(first, high) < end:
            low, high, width = high + 1, min(high + width, len(tokens)), 2 * width
        low = min(low, high)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if before + complete(first, middle) >= end else (middle + 1, high)
        found.append(high - 1)
        low = high
        if high - 1 > first and not decode(tokens[first : high - 1]).endswith(INCOMPLETE):
            before += complete(first, high) - complete(high - 1, high)
            first = high - 1
    return [*found, len(tokens) - 1]
