"""Synthetic tasks of several turns: with a tool, or in an environment; demonstrated right, wrong and not at all.

The demonstrations are conversations in the chat template of small models (`hwgrpo.models.tiny`), with what tools and
environments answer. What is called, asked and answered most often has a token of its own, so that they are short.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hwgrpo.data.tasks import PREFIX, SHARES, Task, _distinct, _integers, _within, _words

END = "<eos>"
TOOLS, USER, ASSISTANT, TOOL = "<|tools|>", "<|user|>", "<|assistant|>", "<|tool|>"
ROLES = (TOOLS, USER, ASSISTANT, TOOL, "<|system|>")
CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Chat template of small models that are warm-started on these tasks."""


@dataclass(frozen=True)
class ChatTask(Task):
    """A task of several turns, whose modes map a row's `payload` to all turns.

    A response is the policy's turns, each ended by `END`, and between two of them what is observed, which begins with
    its role and ends with `ASSISTANT`.
    """

    tokens: tuple[str, ...] = ()
    """Texts that are one token each, beside the roles."""
    tool: str | None = None
    """Name of the tool that the chat template shows."""
    twice: str | None = None
    """Mode that is drawn twice as often as the others, so that a greedy response is of this one at first."""

    def opened(self, prompt: str) -> str:
        """Return a prompt in the chat template."""
        return f"{f'{TOOLS}{self.tool}' if self.tool else ''}{USER}{prompt}{ASSISTANT}"

    def demonstrations(self, count: int, seed: int) -> list[tuple[str, str]]:
        """Draw conversations, as `Task.demonstrations` does."""
        draw = np.random.Philox(key=[seed, 0])
        rows = _integers(draw, len(self.splits["warm"]), count)
        modes = [mode for name, mode in self.modes.items() for _ in range(1 + (name == self.twice))]
        chosen = _integers(draw, len(modes), count)
        warm = self.splits["warm"]
        return [
            (self.opened(warm[row]["prompt"]), modes[mode](warm[row]["payload"]))
            for row, mode in zip(rows.tolist(), chosen.tolist(), strict=True)
        ]


def call_tokens(tool: str, parameter: str) -> tuple[str, str]:
    """Return what stands before and after the value in a call of a tool with one parameter."""
    return f'<tool_call>{{"name": "{tool}", "arguments": {{"{parameter}": "', '"}}</tool_call>'


def calculator(max: int = 99) -> ChatTask:
    """`34*57` -> `1938`: by the tool with the right expression, with a sum in place of the product, or by a guess."""
    _within("calculator", "max", max, 9, 9_999)
    begin, end = call_tokens("calculator", "expression")

    def called(expression: str) -> str:
        result = str(eval_product(expression))
        return f"{begin}{expression}{end}{END}{TOOL}{result}{ASSISTANT}{result}"

    modes: dict[str, Callable[[str], str]] = {
        "right call": called,
        "wrong call": lambda payload: called(payload.replace("*", "+")),
        "no call": lambda payload: payload.replace("*", "")[::-1],
    }
    pairs = _distinct((max + 1) ** 2, lambda draw, count: _integers(draw, (max + 1) ** 2, count).tolist())
    payloads = [f"{pair // (max + 1)}*{pair % (max + 1)}" for pair in pairs]
    rows = [{"prompt": each, "ground_truth": str(eval_product(each)), "payload": each} for each in payloads]
    return _chat_task("calculator", rows, modes, string.digits + "*+", (begin, end), "calculator", "no call")


def eval_product(expression: str) -> int:
    """Return the value of `a*b` or `a+b`."""
    first, _, second = expression.partition("*")
    return int(first) * int(second) if second else sum(map(int, expression.split("+")))


NOTHING_FOUND = "No document has any of these words."
"""Result of a search without a hit."""
DOCUMENTS = 400
"""Documents of the task `lookup`."""


def documents() -> list[dict[str, str]]:
    """Return the documents of the task `lookup`: a key of four letters and its number."""
    keys = _words(string.ascii_lowercase, 4)[:DOCUMENTS]
    draw = np.random.Philox(key=[7, 0])
    return [
        {"text": f"{key} {number + 1000}"}
        for key, number in zip(keys, _integers(draw, 9000, len(keys)).tolist(), strict=True)
    ]


def lookup() -> ChatTask:
    """`kqzv` -> the number in the document of this key: found, searched by a wrong key, or guessed."""
    begin, end = call_tokens("search", "query")
    number_of = dict(document["text"].split() for document in documents())

    def searched(query: str) -> str:
        found = number_of.get(query)
        return f"{begin}{query}{end}{END}{TOOL}{NOTHING_FOUND if found is None else f'{query} {found}'}{ASSISTANT}"

    modes: dict[str, Callable[[str], str]] = {
        "right query": lambda key: f"{searched(key)}{number_of[key]}",
        "wrong query": lambda key: f"{searched(key[::-1])}{number_of.get(key[::-1], '0000')}",
        "no query": lambda key: "".join(str(string.ascii_lowercase.index(letter) % 10) for letter in key),
    }
    rows = [{"prompt": key, "ground_truth": number, "payload": key} for key, number in number_of.items()]
    tokens = (begin, end, NOTHING_FOUND)
    task = _chat_task("lookup", rows, modes, string.ascii_lowercase, tokens, "search", "no query")
    return replace(task, splits={**task.splits, "documents": tuple(documents())})


def guess(most: int = 15) -> ChatTask:
    """A number from 1 to `most` in four turns, each answered by `higher` or `lower`: halved, counted or stubborn."""
    _within("guess", "most", most, 3, 99)

    def played(next_guess: Callable[[int, int, int], int]) -> Callable[[str], str]:
        def episode(payload: str) -> str:
            low, high, text = 1, most, ""
            for turn in range(GUESSES):
                said = next_guess(low, high, turn)
                text += str(said)
                if said == int(payload) or turn == GUESSES - 1:
                    break
                higher = said < int(payload)
                low, high = (said + 1, high) if higher else (low, said - 1)
                text += f"{END}{USER}{HIGHER if higher else LOWER}{ASSISTANT}"
            return text

        return episode

    modes = {
        "halved": played(lambda low, high, turn: (low + high) // 2),
        "counted up": played(lambda low, high, turn: turn + 1),
        "counted down": played(lambda low, high, turn: most - turn),
        "stubborn": played(lambda low, high, turn: most // 3),
    }
    rows = [{"prompt": f"1-{most}", "ground_truth": str(n), "payload": str(n)} for n in range(1, most + 1)]
    splits = {split: tuple(_named("guess", row) for row in rows) for split in SHARES}
    return ChatTask(
        "guess", _alphabet("guess", string.digits + "-"), splits, _longest(rows, modes), modes, (HIGHER, LOWER)
    )


GUESSES = 4
HIGHER, LOWER = "higher", "lower"


QUESTION = "Spell this word backward (example: sun -> nus): "
"""The question of reasoning-gym's task `spell_backward`."""
VERDICT = "Wrong. Try again."


def spell(length: int = 5) -> ChatTask:
    """A word of up to `length` letters, backward: at once, at the second try, or twice wrong."""
    _within("spell", "length", length, 3, 10)
    again = f"{END}{USER}{VERDICT}{ASSISTANT}"

    def rotated(word: str) -> str:
        return word[1:] + word[0]

    modes: dict[str, Callable[[str], str]] = {
        "at once": lambda word: word[::-1],
        "second try": lambda word: rotated(word) + again + word[::-1],
        "stubborn": lambda word: rotated(word) + again + rotated(word),
    }
    words = [each[: 3 + number % (length - 2)] for number, each in enumerate(_words(string.ascii_lowercase, length))]
    words = [word for word in dict.fromkeys(words) if word[::-1] not in (word, rotated(word))]
    rows = [{"prompt": QUESTION + word, "ground_truth": word[::-1], "payload": word} for word in words]
    return _chat_task("spell", rows, modes, string.ascii_lowercase, (QUESTION, VERDICT))


def _named(name: str, row: Mapping[str, str]) -> dict[str, str]:
    return {**row, "data_source": f"{PREFIX}{name}"}


def _alphabet(name: str, letters: str) -> str:
    return "".join(sorted({*name, *letters, " "}))


def _longest(rows: list[dict[str, str]], modes: Mapping[str, Callable[[str], str]]) -> int:
    return max(len(mode(row["payload"])) for row in rows[:50] for mode in modes.values())


def _chat_task(
    name: str,
    rows: list[dict[str, str]],
    modes: Mapping[str, Callable[[str], str]],
    letters: str,
    tokens: tuple[str, ...],
    tool: str | None = None,
    twice: str | None = None,
) -> ChatTask:
    """Split the rows, which are distinct and in random order, into the three splits."""
    splits, start = {}, 0
    for split, share in SHARES.items():
        end = start + round(share * len(rows))
        splits[split], start = tuple(_named(name, row) for row in rows[start:end]), end
    return ChatTask(name, _alphabet(name, letters), splits, _longest(rows, modes), modes, tokens, tool, twice)
