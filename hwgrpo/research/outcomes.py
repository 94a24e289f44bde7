"""Outcomes of a rule, which an online reward model learns: which responses are verified, and the replay buffer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, order=True)
class Outcome:
    """What the rule says of a response, or of a response up to the end of a step."""

    uid: str
    """Of the prompt."""
    sample: int
    """Index of the response in its group."""
    end: int
    """Characters of the response up to the end of the step; of the whole response for an outcome of its own."""
    tokens: tuple[int, ...]
    """Prompt and response as the reward model reads them."""
    target: float
    """The rule's outcome."""
    score: float
    """The reward model's logit when the response was scored."""


def verified(uid: str, size: int, share: float, seed: int) -> list[int]:
    """Return which responses of a group the rule verifies, ascending.

    They depend on seed and prompt alone, so on neither ranks nor batches. Where `share * size` is no whole number, the
    number of responses is drawn so that this is its mean.

    Args:
        uid: of the prompt.
        size: number of its responses.
        share: share of verified responses.
        seed: of the run.
    """
    drawn = random.Random(f"verified {seed} {uid}")
    count = int(share * size + drawn.random())
    return sorted(drawn.sample(range(size), min(count, size)))


class ReplayBuffer:
    """The newest outcomes that the model was trained on.

    Args:
        size: most outcomes that are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.rows: list[Outcome] = []

    def mixed(self, new: Sequence[Outcome], history: float, seed: str) -> list[Outcome]:
        """Return new outcomes with `history` times as many old ones, and keep the new ones.

        Args:
            new: outcomes since the last call.
            history: number of old outcomes per new one; fewer, if there are not so many.
            seed: of the drawn ones.
        """
        count = min(len(self.rows), round(history * len(new)))
        old = random.Random(f"history {seed}").sample(self.rows, count)
        self.rows = [*self.rows, *new][-self._size :]
        return [*new, *old]


def pairs(rows: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    """Return (better, worse) for all two responses to one prompt, or steps of them, with different outcomes."""
    by_prompt: dict[str, list[Outcome]] = {}
    for row in rows:
        by_prompt.setdefault(row.uid, []).append(row)
    return [(a, b) for group in by_prompt.values() for a in group for b in group if a.target > b.target]


def to_tensors(rows: Sequence[Outcome], prefix: str) -> dict[str, torch.Tensor]:
    """Return outcomes as tensors, for a checkpoint."""
    texts = json.dumps([row.uid for row in rows]).encode()
    return {
        f"{prefix}.uids": torch.tensor(list(texts), dtype=torch.uint8),
        f"{prefix}.places": torch.tensor([[row.sample, row.end] for row in rows], dtype=torch.int64).view(-1, 2),
        f"{prefix}.lengths": torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64),
        f"{prefix}.tokens": torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int64),
        f"{prefix}.values": torch.tensor([[row.target, row.score] for row in rows], dtype=torch.float64).view(-1, 2),
    }


def from_tensors(tensors: dict[str, torch.Tensor], prefix: str) -> list[Outcome]:
    """Invert `to_tensors`."""
    uids = json.loads(bytes(tensors[f"{prefix}.uids"].tolist()))
    rows = tensors[f"{prefix}.tokens"].split(tensors[f"{prefix}.lengths"].tolist())
    places, values = tensors[f"{prefix}.places"].tolist(), tensors[f"{prefix}.values"].tolist()
    return [
        Outcome(uid, sample, end, tuple(row.tolist()), target, score)
        for uid, (sample, end), row, (target, score) in zip(uids, places, rows, values, strict=True)
    ]
