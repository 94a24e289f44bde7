"""Rows whose prompt is that of an earlier row, or is in a split to test with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hwgrpo.data.formats import Row
from hwgrpo.data.row_schema import identity

NAMED = 10
"""Number of places that are kept."""
PAIR = ("chosen", "rejected")
"""Columns that make rows with the same prompt different ones."""


def identity_of(row: Row) -> str:
    """Return a key for rows in verl's schema with equal prompts, images included."""
    images = [hashlib.sha256(each["bytes"]).hexdigest() for each in row.get("images", ())]
    return identity(row["prompt"], images)


@dataclass
class Places:
    """Places of rows that have something in common."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    """Places of the first `NAMED` of them."""

    def add(self, place: str) -> None:
        """Count a row."""
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append(place)

    def __add__(self, other: Places) -> Places:
        return Places(self.count + other.count, (self.first + other.first)[:NAMED])


class DuplicateFilter:
    """Tells new rows of a split from repeated ones.

    Args:
        held_out: identity of a prompt that must not be in this split -> the split that has it.
    """

    def __init__(self, held_out: Mapping[str, str]) -> None:
        self.repeated: dict[str, Places] = {}
        """Reason -> the rows that were found to be repeated."""
        self._held_out = held_out
        self._truths: dict[str, Any] = {}

    def is_new(self, row: Row, place: str) -> bool:
        """Return whether a row in verl's schema is the first with its prompt; note it otherwise."""
        prompt = identity_of(row)
        key = prompt + "".join(json.dumps(row[column]) for column in PAIR if column in row)
        truth = row["reward_model"]["ground_truth"]
        if prompt in self._held_out:
            reason = f"has a prompt of {self._held_out[prompt]}"
        elif key not in self._truths:
            self._truths[key] = truth
            return True
        elif self._truths[key] == truth:
            reason = "repeats an earlier row"
        else:
            reason = "repeats the prompt of an earlier row, with another ground truth"
        self.repeated.setdefault(reason, Places()).add(place)
        return False
