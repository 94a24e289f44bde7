"""What the trainer and the processes of reward functions say to each other.

A message is its length in 8 bytes and that many bytes more. To a process go pickles: what the trainer says is trusted,
and data rows hold objects of many kinds. From a process comes JSON only, because what a reward function's code sends
must not be able to run anything in the trainer.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from decimal import Decimal
from typing import Any

from hwgrpo.errors import RewardError, quoted
from hwgrpo.jsonlines import jsonable

HEADER = 8
LARGEST = 64 << 20
"""Bytes of the largest message that is taken from a process."""
SHOWN = 200
"""Characters of a value that a message to a person shows."""


class Unfit:
    """A value that is no reward, as its process described it: it shows itself as that value did."""

    def __init__(self, shown: str, kind: str) -> None:
        self.shown, self.kind = shown, kind

    def __repr__(self) -> str:
        return self.shown


def framed(body: bytes) -> bytes:
    """Return a message with its length before it."""
    return len(body).to_bytes(HEADER, "big") + body


class Reader:
    """Puts messages together from the pieces in which a pipe delivers them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that are whole now.

        Raises:
            ValueError: the bytes are no messages, or one is larger than `LARGEST`.
        """
        self._buffer += piece
        while len(self._buffer) >= HEADER:
            size = int.from_bytes(self._buffer[:HEADER], "big")
            if size > LARGEST:
                raise ValueError(f"a message of {size} bytes")
            if len(self._buffer) < HEADER + size:
                return
            body = bytes(self._buffer[HEADER : HEADER + size])
            del self._buffer[: HEADER + size]
            try:
                message = json.loads(body)
            except RecursionError as error:
                raise ValueError("a message that is nested too deeply") from error
            if not isinstance(message, dict):
                raise ValueError("a message of an unknown form")
            yield message


def as_json(message: Mapping[str, Any]) -> bytes:
    """Encode a message to the trainer.

    What JSON does not know becomes what completions.jsonl would make of it; numbers that are not finite stay numbers.

    Raises:
        ValueError: it is larger than `LARGEST`, or refers to itself.
        TypeError: a dict in it has keys that JSON cannot hold.
    """
    body = json.dumps(message, default=jsonable).encode()
    if len(body) > LARGEST:
        raise ValueError(
            f"it returned {len(body) / 2**20:,.0f} MiB; from a separate process a function can return "
            f"{LARGEST >> 20} MiB at most"
        )
    return body


def number_of(value: Any) -> float | None:
    """Return a reward as a float: NaN for None, infinity for one that no float can hold; None for what is no number."""
    if value is None:
        return math.nan
    try:
        # an array or a tensor of one number, told by what it can do: neither library is imported for this
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
            value = value.item()
        return float(value) if isinstance(value, numbers.Real | Decimal) else None
    except OverflowError:
        return math.inf
    except Exception:  # a class of the user's may raise anything
        return None


def pack_one(value: Any) -> Any:
    """Return what a function gave for one response as something for `as_json`: a number, None, or a tagged dict."""
    if isinstance(value, Mapping):
        return {"fields": {**value, "score": pack_one(value["score"])} if "score" in value else dict(value)}
    number = number_of(value)
    if number is None:
        return {"unfit": quoted(value, SHOWN), "kind": type(value).__name__}
    return None if value is None else number


def unpack_one(packed: Any) -> Any:
    """Return what `pack_one` was given: a number, None or a dict; an `Unfit` in the place of anything else."""
    if not isinstance(packed, dict):
        return packed
    if "fields" in packed:
        fields = dict(packed["fields"])
        return {**fields, "score": unpack_one(fields["score"])} if "score" in fields else fields
    return Unfit(str(packed.get("unfit")), str(packed.get("kind")))


def pack_all(values: Any) -> Any:
    """Return what a function gave for a whole batch: a list of `pack_one`, or a tagged dict when it is no list."""
    if not is_listed(values):
        return {"unfit": "", "kind": type(values).__name__}
    return [pack_one(value) for value in values]


def is_listed(values: Any) -> bool:
    """Whether values have an order and a length: neither a text, a dict, a set nor an array of no dimension."""
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        return False
    try:
        return len(values) >= 0 and iter(values) is not None  # type: ignore[arg-type] - refused where it has none
    except Exception:  # an array of no dimension, a generator, or a class of the user's, which may raise anything
        return False


def unpack_all(packed: Any) -> Any:
    """Return the list that `pack_all` was given, or an `Unfit` when it was none."""
    return [unpack_one(value) for value in packed] if isinstance(packed, list) else unpack_one(packed)


def merge_extras(extras: Sequence[dict[str, Any]], sent: Any) -> None:
    """Add the fields that a function logged in its process to the trainer's dicts, one per response.

    Raises:
        RewardError: they are not one dict per response.
    """
    if not isinstance(sent, list) or len(sent) != len(extras) or not all(isinstance(each, dict) for each in sent):
        raise RewardError("a reward's process sent fields that are not one dict for each response")
    for extra, more in zip(extras, sent, strict=True):
        extra.update(more)
