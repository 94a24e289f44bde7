"""Synthetic tasks: small, endless, checkable, without a download.

A task's prompt reads `<name> <payload>=`, e.g. `sort 3142=`, and the correct response is a function of the payload.
Warm-start demonstrations are drawn from several modes with equal probability, of which only the first is correct: the
warm-started model then has the skill without preferring it, which leaves room for improvement by RL.
"""

from __future__ import annotations

import functools
import inspect
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from hwgrpo.catalog import TASKS
from hwgrpo.errors import ConfigError, choice_error

PREFIX = "task://"
SHARES = {"warm": 0.4, "train": 0.5, "validation": 0.1}
LARGEST = 20_000
"""Limit on the prompts of a task over all splits; a larger space is sampled."""
SEED = 20_240
"""Seed of the prompts and splits; fixed, so that a task's name determines its data."""


@dataclass(frozen=True)
class Task:
    """A synthetic task: prompts in three disjoint splits, and demonstrations."""

    name: str
    alphabet: str
    """Every character of the prompts and demonstrations, once, sorted."""
    splits: Mapping[str, tuple[Mapping[str, str], ...]]
    """"warm", "train", "validation" -> rows {prompt, ground_truth, data_source}."""
    max_response_chars: int
    """Length of the longest demonstration."""
    modes: Mapping[str, Callable[[str], str]]
    """Modes of demonstrations, payload -> response; the first is correct."""

    def demonstrations(self, count: int, seed: int) -> list[tuple[str, str]]:
        """Draw warm-start examples, with replacement, from the warm split and uniformly from the modes.

        Args:
            count: number of examples.
            seed: the same seed gives the same examples.

        Returns:
            (prompt, response) pairs.
        """
        draw = np.random.Philox(key=[seed, 0])
        rows = _integers(draw, len(self.splits["warm"]), count)
        answers = tuple(self.modes.values())
        modes = _integers(draw, len(answers), count)
        pairs = []
        for row, mode in zip(rows.tolist(), modes.tolist(), strict=True):
            prompt = self.splits["warm"][row]["prompt"]
            pairs.append((prompt, answers[mode](self.payload(prompt))))
        return pairs

    def payload(self, prompt: str) -> str:
        """Return the part of a prompt that the answer depends on: `3142` of `sort 3142=`."""
        return prompt.removeprefix(f"{self.name} ").removesuffix("=")


@functools.lru_cache(maxsize=4)
def parse_task(spec: str) -> Task:
    """Build the task of a `task://name?option=value&...` address; once, since a run reads it several times.

    Raises:
        ConfigError: the task or an option is unknown, or a value is not a number or out of range.
    """
    assert spec.startswith(PREFIX), spec
    name, _, query = spec.removeprefix(PREFIX).partition("?")
    if name not in TASKS:
        raise choice_error(f"{spec}: task", name, TASKS.names())
    factory = TASKS.load(name)
    allowed = inspect.signature(factory).parameters
    options: dict[str, Any] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in allowed:
            raise choice_error(f"{spec}: option", key, allowed)
        try:
            options[key] = type(allowed[key].default)(value)
        except ValueError:
            raise ConfigError(f"{spec}: {key}={value!r} is not an integer; e.g. {key}={allowed[key].default}") from None
    if query and not options:
        raise ConfigError(f"{spec}: {query!r} is not option=value; options of {name!r}: {', '.join(allowed)}")
    return factory(**options)


def sort_digits(digits: int = 4) -> Task:
    """`sort 3142=` -> `1234`. Demonstrated ascending, descending and copied."""
    _within("sort", "digits", digits, 2, 32)
    modes = {
        "ascending": lambda payload: "".join(sorted(payload)),
        "descending": lambda payload: "".join(sorted(payload, reverse=True)),
        "copied": lambda payload: payload,
    }
    return _task("sort", string.digits, modes, _words(string.digits, digits), digits)


def add_numbers(max: int = 99) -> Task:
    """`add 12+34=` -> `46`, addends from 0 to `max`. Demonstrated correct, one too large and two too large."""
    _within("add", "max", max, 9, 1_000_000)

    def plus(extra: int) -> Callable[[str], str]:
        return lambda payload: str(sum(map(int, payload.split("+"))) + extra)

    modes = {"correct": plus(0), "one_more": plus(1), "two_more": plus(2)}
    pairs = _distinct((max + 1) ** 2, lambda draw, count: _integers(draw, (max + 1) ** 2, count).tolist())
    payloads = [f"{pair // (max + 1)}+{pair % (max + 1)}" for pair in pairs]
    return _task("add", string.digits + "+", modes, payloads, len(str(2 * max + 2)))


def copy_word(length: int = 6) -> Task:
    """`copy qwerty=` -> `qwerty`. Demonstrated copied, reversed and with the first letter moved to the end."""
    _within("copy", "length", length, 2, 32)
    modes = {
        "copied": lambda payload: payload,
        "reversed": lambda payload: payload[::-1],
        "rotated": lambda payload: payload[1:] + payload[0],
    }
    return _task("copy", string.ascii_lowercase, modes, _words(string.ascii_lowercase, length), length)


def _within(task: str, option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{PREFIX}{task}?{option}={value} is out of range; allowed: {low} to {high}")


def _words(letters: str, length: int) -> list[str]:
    """Return distinct words of `length` letters, in an order drawn from SEED."""
    codes = np.frombuffer(letters.encode("ascii"), dtype=np.uint8)

    def draw_words(draw: np.random.Philox, count: int) -> list[str]:
        text = codes[_integers(draw, len(letters), count * length)].tobytes().decode("ascii")
        return [text[start : start + length] for start in range(0, len(text), length)]

    return _distinct(len(letters) ** length, draw_words)


def _distinct(space: int, draw_many: Callable[[np.random.Philox, int], list[Any]]) -> list[Any]:
    """Draw until min(space, LARGEST) different items are drawn; in order of their first appearance."""
    wanted = min(space, LARGEST)
    draw = np.random.Philox(key=[SEED, 0])
    found: dict[Any, None] = {}
    while len(found) < wanted:
        found.update(dict.fromkeys(draw_many(draw, wanted)))
    return list(found)[:wanted]


def _integers(draw: np.random.Philox, below: int, count: int) -> np.ndarray:
    """Draw numbers from 0 to below - 1. Raw bits, since numpy may change the algorithms of its `Generator`."""
    return (draw.random_raw(count) % np.uint64(below)).astype(np.int64)


def _task(
    name: str, payload_alphabet: str, modes: Mapping[str, Callable[[str], str]], payloads: list[str], longest: int
) -> Task:
    """Split the payloads, which are distinct and in random order, into the three splits."""
    right = next(iter(modes.values()))
    rows = [
        {"prompt": f"{name} {payload}=", "ground_truth": right(payload), "data_source": f"{PREFIX}{name}"}
        for payload in payloads
    ]
    splits, start = {}, 0
    for split, share in SHARES.items():
        end = start + round(share * len(rows))
        splits[split], start = tuple(rows[start:end]), end
    return Task(name, "".join(sorted({*name, *payload_alphabet, *" ="})), splits, longest, modes)
