"""Responses that have ended, with their keys and values, for requests that continue them. Bounded in memory."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from hwgrpo.rollout.local.decode_rows import digests_of
from hwgrpo.rollout.local.shared_prefix_attention import ParkedRow
from hwgrpo.rollout.local.slot_scheduler import Request, most_kept_tokens


class Kept(NamedTuple):
    """A response that has ended."""

    tokens: np.ndarray
    """int64, of prompt and response, as far as keys and values are kept."""
    row: ParkedRow


class KeptResponses:
    """Ended responses by the numbers of their requests.

    Beyond the limit (`most_kept_tokens`) the one that ended first is dropped, of those that no queued request
    continues; if all are continued, the newest.

    Args:
        slots: of the decoder.
        longest: most tokens of a sequence.
    """

    def __init__(self, slots: int, longest: int) -> None:
        self._slots, self._longest = slots, longest
        self._kept: dict[int, Kept] = {}
        """In the order in which they ended."""
        self._awaited: set[int] = set()
        """Numbers of responses that a queued request continues."""
        self._of_prompt: Counter[int] = Counter()
        """Kept responses to each prompt, by the prompt's number."""
        self.tokens = 0
        """Tokens whose keys and values are kept, each prompt counted once."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, number: int) -> bool:
        return number in self._kept

    def expect(self, request: Request) -> None:
        """Record that a queued request continues a response."""
        if request.continues is not None:
            self._awaited.add(request.continues)

    def add(self, number: int, tokens: np.ndarray, row: ParkedRow) -> None:
        """Keep a response, and drop others beyond the limit."""
        self._kept[number] = Kept(tokens, row)
        prompt = row.prompt
        self.tokens += row.length - (prompt.length if self._of_prompt[prompt.number] else 0)
        self._of_prompt[prompt.number] += 1
        most = most_kept_tokens(self._slots, self._longest, row.token_bytes)
        while self.tokens > most:
            unused = (number for number in self._kept if number not in self._awaited)
            self._drop(next(unused, number))

    def release(self, number: int) -> None:
        """Keep a response no longer, if it is kept."""
        self._awaited.discard(number)
        if number in self._kept:
            self._drop(number)

    def beginning(self, request: Request) -> Kept | None:
        """Return the kept response that a request continues, if the request's prompt begins with it."""
        kept = None if request.continues is None else self._kept.get(request.continues)
        if kept is None or len(request.prompt) <= len(kept.tokens):
            return None
        seen = kept.row.images == digests_of(request.prompt)[: len(kept.row.images)]
        return kept if seen and np.array_equal(request.prompt[: len(kept.tokens)], kept.tokens) else None

    def _drop(self, number: int) -> None:
        row = self._kept.pop(number).row
        self._of_prompt[row.prompt.number] -= 1
        self.tokens -= row.length - (row.prompt.length if self._of_prompt[row.prompt.number] else 0)
