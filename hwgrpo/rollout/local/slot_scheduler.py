"""Which response each slot of the batch decodes: responses wait in a queue and get slots in order. Pure host code."""

from __future__ import annotations

import heapq
import sys
from collections import Counter, deque
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

SLOT = np.dtype(
    [
        ("number", np.int64),
        ("group", np.int64),
        ("key", np.uint64),
        ("kind", np.int64),
        ("limit", np.int64),
        ("drawn", np.int64),
        ("kept", np.bool_),
        ("growing", np.bool_),
    ]
)
"""A slot: its response's number, group, key, kind and limit of tokens; the tokens drawn; whether the response is kept
for further requests; and whether it has not ended.

A slot is free if its response has ended."""

PREFILL_AHEAD = 2
"""Where prompts are prefilled, those of the next responses are, too, for one of so many slots: several together take an
accelerator or a tiny model little longer than one."""


class Request(NamedTuple):
    """A response to decode."""

    prompt: tuple[int, ...]
    """Token ids; requests with equal ones share a prefill."""
    key: int
    """uint64 of `stream_keys`."""
    limit: int
    """Most tokens of the response."""
    kind: int = 0
    """Index of its settings (`decoding.Settings`)."""
    group: int = 0
    """Index of its prompt in the batch."""
    kept: bool = False
    """Whether its keys and values are kept when it has ended, until `Decoder.release` or another one continues it."""
    continues: int | None = None
    """Number of a kept response that the prompt continues: it begins with the tokens of its prompt and response."""


KEPT_BYTES = 2**30
"""Bytes of keys and values of ended turns that are kept in any case."""


def most_kept_tokens(slots: int, longest: int, token_bytes: int) -> int:
    """Return the most tokens whose keys and values are kept of ended turns: as many as the slots hold, or `KEPT_BYTES`.

    Args:
        slots: of the decoder.
        longest: tokens of a sequence in a slot.
        token_bytes: bytes of keys and values per token.
    """
    return max(slots * longest, KEPT_BYTES // token_bytes)


def most_prompts(slots: int, n: int) -> int:
    """Return how many prompts of n responses each may be held for so many slots.

    Of a group whose other responses have ended, a long one still holds the prompt. Lognormal lengths hold up to 3.4
    times as many prompts as slots hold groups; with 3 times as many, no more than 2 % of decode steps are added.
    """
    return 3 * -(-slots // n)


class SlotScheduler:
    """Assigns queued requests to free slots, in order.

    Args:
        slots: most responses that are decoded at once.
        prompts: most prompts that are held at once (`most_prompts`), at least 1; a request with a further one waits.
            None: any number.
        refills: a slot is refilled while others grow; otherwise slots are filled once all responses have ended, with
            groups that are not split, as far as slots are enough for one.
        one_length: prompts that are in slots together have equal lengths. Only without `refills`.

    Example:
        With 2 slots and responses of 5, 2, 2 and 3 tokens, the second slot holds the second, third and fourth one: 4
        decode steps, for a response's first token is drawn from its prompt (`decode_steps`).
    """

    def __init__(
        self, slots: int, prompts: int | None = None, *, refills: bool = True, one_length: bool = False
    ) -> None:
        assert slots >= 1
        self._most, self._refills, self._one_length = slots, refills, one_length
        self.most_prompts = sys.maxsize if prompts is None else prompts
        self._queue: deque[tuple[int, Request]] = deque()
        self._submitted = 0
        self.pending: Counter[tuple[int, ...]] = Counter()
        """Queued requests of each prompt."""
        self.slots = np.empty(0, dtype=SLOT)
        """[B] `SLOT`: slots of the batch, free ones included."""

    def submit(self, request: Request) -> int:
        """Append a request to the queue; return its number, counted from 0."""
        self._queue.append((self._submitted, request))
        self.pending[request.prompt] += 1
        self._submitted += 1
        return self._submitted - 1

    def admit(self, held: Collection[tuple[int, ...]] = ()) -> tuple[np.ndarray, list[Request]]:
        """Assign the next requests to free slots; return these slots [A] int64, and the requests.

        Args:
            held: prompts of responses that have not ended.
        """
        growing = self.slots["growing"]
        if not self._queue or (not self._refills and growing.any()):
            return np.empty(0, dtype=np.int64), []
        if not growing.any():
            self.slots = self.slots[:0]
        free = np.flatnonzero(~self.slots["growing"])
        count = min(len(self._queue), self._most - len(self.slots) + len(free))
        count = self._with_held(count, held) if self._refills else self._whole_groups(count)
        chosen = [self._queue.popleft() for _ in range(count)]
        first_new = len(self.slots)
        added = max(0, count - len(free))
        self.slots = np.concatenate([self.slots, np.zeros(added, dtype=SLOT)])
        places = np.concatenate([free[:count], np.arange(first_new, first_new + added)])
        self.slots[places] = np.array(
            [(number, r.group, r.key, r.kind, r.limit, 0, r.kept, True) for number, r in chosen], SLOT
        )
        requests = [request for _, request in chosen]
        self._no_longer_queued(requests)
        return places, requests

    def _no_longer_queued(self, requests: Sequence[Request]) -> None:
        for prompt, count in Counter(request.prompt for request in requests).items():
            self.pending[prompt] -= count
            if not self.pending[prompt]:
                del self.pending[prompt]

    def _with_held(self, count: int, held: Collection[tuple[int, ...]]) -> int:
        """Return how many of the next requests to admit, so that not too many prompts are held."""
        prompts = {*held}
        for admitted, (_, request) in enumerate(islice(self._queue, count)):
            if request.prompt not in prompts and len(prompts) >= self.most_prompts:
                return admitted
            prompts.add(request.prompt)
        return count

    def _whole_groups(self, count: int) -> int:
        """Return how many of the next requests to admit together."""
        ahead = [request for _, request in islice(self._queue, count + 1)]
        if self._one_length:
            equal = [len(request.prompt) == len(ahead[0].prompt) for request in ahead]
            count = min(count, equal.index(False) if False in equal else count)
        if count < len(ahead):
            groups = [request.group for request in ahead]
            first = groups.index(groups[count])
            count = first or count  # a group that is larger than all slots is split
        return count

    def next_requests(self, count: int) -> list[Request]:
        """Return the next `count` requests of the queue."""
        return [request for _, request in islice(self._queue, count)]

    def keep(self, kept: np.ndarray) -> None:
        """Keep the slots `kept`, int64, and drop the others, which are free."""
        self.slots = self.slots[kept]

    def drop_queued(self, group: int) -> None:
        """Remove the requests of a group from the queue."""
        self._no_longer_queued([request for _, request in self._queue if request.group == group])
        self._queue = deque(each for each in self._queue if each[1].group != group)


def decode_steps(lengths: Sequence[int], slots: int) -> int:
    """Return the decode steps of responses in slots that are refilled at every step: list scheduling in order.

    Args:
        lengths: tokens of each response, in the order of the queue; the first of each is drawn from its prompt.
        slots: number of slots.
    """
    free_at = [0] * slots
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length - 1)
    return max(free_at)
