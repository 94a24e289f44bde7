"""Messages between the trainer and the processes of reward functions.

Messages to a process are pickles: the trainer is trusted, and data
rows have objects of many types. Messages from a process are JSON, so that a reward function's code cannot execute code
in the trainer.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence, Set
from decimal import Decimal
from typing import Any

from hwgrpo.errors import RewardError, quoted
from hwgrpo.support.framed_messages import MAX_MESSAGE_BYTES
from hwgrpo.support.jsonlines import jsonable

SHOWN_CHARS = 200
"""Characters of a value that an error shows."""


class InvalidReward:
    """Description of a value that is not a valid reward, with the repr of that value."""

    def __init__(self, shown: str, kind: str) -> None:
        self.shown, self.kind = shown, kind

    def __repr__(self) -> str:
        return self.shown


def encode_reply(message: Mapping[str, Any]) -> bytes:
    """Encode a message to the trainer.

    Values that JSON lacks are encoded as in completions.jsonl; non-finite numbers stay numbers.

    Raises:
        ValueError: the message is larger than `MAX_MESSAGE_BYTES`, or refers to itself.
        TypeError: a dict in it has keys that JSON does not support.
    """
    body = json.dumps(message, default=jsonable).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"it returned {len(body) / 2**20:,.0f} MiB; from a separate process a function can return "
            f"{MAX_MESSAGE_BYTES >> 20} MiB at most"
        )
    return body


def number_of(value: Any) -> float | None:
    """Return a reward as a float: NaN for None, infinity on overflow; None for a value that is not a number."""
    if value is None:
        return math.nan
    try:
        # an array or a tensor of one number, detected by its attributes: neither library is imported for this
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
            value = value.item()
        return float(value) if isinstance(value, numbers.Real | Decimal) else None
    except OverflowError:
        return math.inf
    except Exception:  # a class of the user's may raise anything
        return None


def pack_one(value: Any) -> Any:
    """Convert the value of one response for `encode_reply`: a number, None, or a tagged dict."""
    if isinstance(value, Mapping):
        return {"fields": {**value, "score": pack_one(value["score"])} if "score" in value else dict(value)}
    number = number_of(value)
    if number is None and is_listed(value):
        return {"steps": [None if each is None else number_of(each) for each in value], "kind": type(value).__name__}
    if number is None:
        return {"unfit": quoted(value, SHOWN_CHARS), "kind": type(value).__name__}
    return None if value is None else number


def unpack_one(packed: Any) -> Any:
    """Invert `pack_one`: return a number, None, a dict, or an `InvalidReward` for any other value."""
    if not isinstance(packed, dict):
        return packed
    if "steps" in packed:
        return packed["steps"]
    if "fields" in packed:
        fields = dict(packed["fields"])
        return {**fields, "score": unpack_one(fields["score"])} if "score" in fields else fields
    return InvalidReward(str(packed.get("unfit")), str(packed.get("kind")))


def pack_all(values: Any) -> Any:
    """Convert the values of a batch: a list of `pack_one`, or a tagged dict for a value that is no list."""
    if not is_listed(values):
        return {"unfit": "", "kind": type(values).__name__}
    return [pack_one(value) for value in values]


def is_listed(values: Any) -> bool:
    """Return whether values have an order and a length: no text, dict, set or 0-d array."""
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        return False
    try:
        return len(values) >= 0 and iter(values) is not None  # type: ignore[arg-type] - refused where it has none
    except Exception:  # a 0-d array, a generator, or a class of the user's, which may raise anything
        return False


def unpack_all(packed: Any) -> Any:
    """Invert `pack_all`: return the list of values, or an `InvalidReward`."""
    return [unpack_one(value) for value in packed] if isinstance(packed, list) else unpack_one(packed)


def merge_extras(extras: Sequence[dict[str, Any]], sent: Any) -> None:
    """Add the fields that a function logged in its process to the trainer's dicts, one per response.

    Raises:
        RewardError: the fields are not one dict per response.
    """
    if not isinstance(sent, list) or len(sent) != len(extras) or not all(isinstance(each, dict) for each in sent):
        raise RewardError("a reward's process sent fields that are not one dict for each response")
    for extra, fields in zip(extras, sent, strict=True):
        extra.update(fields)
