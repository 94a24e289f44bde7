"""What reads a model's text reads each character a bounded number of times, whatever the text repeats."""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from hwgrpo.catalog import REWARDS
from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.rewards.services.concurrent_requests import InvalidReply
from hwgrpo.rewards.services.judge_replies import ScoreReader
from hwgrpo.rewards.verifiers.reasoning_gym_score import EXTRACTS, answer_in
from hwgrpo.sandbox.fenced_blocks import code_blocks
from hwgrpo.sandbox.unit_tests import extract_program
from hwgrpo.support.text import terminal_lines
from tests.support.numbers import response_batch

CHARS = 64_000
AT_ONCE = 0.5
"""CPU seconds: linear readers take a few hundredths for a text of these lengths, quadratic ones some or many. A reader
that takes longer is compared with itself on a quarter of the text, since machines differ."""
AT_MOST = 20.0
"""CPU seconds for any text."""
GROWTH = 8
"""Four times the text takes a linear reader 4 times as long, a quadratic one 16 times: between the two."""
BATCH = {
    "length": {"max_response_tokens": 9},
    "length_cosine": {"max_response_tokens": 9, "correct": "numeric"},
    "repetition": {},
    "json_schema": {"schema": {"type": "object"}, "json_score": 0.5},
}
PER_RESPONSE: dict[str, dict[str, Any]] = {
    "exact_match": {"ground_truth": "18"},
    "gsm8k": {"ground_truth": "18"},
    "math": {"ground_truth": "18", "timeout": 1},
    "geo3k": {"ground_truth": "18", "timeout": 1},
    "format": {},
    "multiple_choice": {"ground_truth": "B"},
    "numeric": {"ground_truth": "9.81 m/s^2", "prefixes": True},
    "question_exact_match": {"ground_truth": ["Paris"]},
    "question_f1": {"ground_truth": ["Paris"]},
    "regex": {"ground_truth": r"[0-9]+ apples$"},
    "tags": {},
    "language": {"language": "en"},
    "by_source": {"ground_truth": "18", "data_source": "openai/gsm8k"},
}
NOT_READING = (
    "reward_model",
    "process_reward_model",
    "online_reward_model",
    "served_reward_model",
    "http",
    "environment",
)
"""They hand the text on to a tokenizer or a server; `environment` has no use for it."""
UNITS = (
    *(
        " ",
        "\t",
        "\n",
        "\r",
        "a",
        "1",
        "a-",
        "a.",
        "a ",
        "-",
        ",",
        "1,",
        "1/",
        "1^",
        "9e9",
        ".5",
        "=",
        "%",
        "²",
        "é",
        "\0",
    ),
    *("score", "score:", "score :*", "**", "answer is ", "Answer: B or A, ", "option ", "A or ", "#### ", "####", "$"),
    *("\\boxed{", "\\frac{1}{", "\\text{", "{", '{"', '{"a":', '{"a":[1,', "[", "}", '"', "\\", "```", "```\n", "`"),
    *("```python\n", "~~~\n", "````\n", "```\n~~~\n", " ```x\n", "<think>", "</think>", "<answer>", "</answer>", "<"),
    *("?token", "&key-", "?", "://", "a://b", "hf_", "sk-", "\x1b[", "http://u:p@", "Step 1\n", "def f():\n"),
)


def _json_score(text: str) -> None:
    ScoreReader(Kwargs("k"), None, "score", None).score(text)


def _score(text: str) -> None:
    ScoreReader(Kwargs("k"), None, None, None).score(text)


READERS: dict[str, Callable[[str], Any]] = {
    **{
        name: lambda text, name=name: REWARDS.load(name)(solution_str=text, **PER_RESPONSE[name])
        for name in PER_RESPONSE
    },
    **{name: lambda text, name=name: REWARDS.load(name)(*response_batch.of([text]), **BATCH[name]) for name in BATCH},
    "code": extract_program,
    "reasoning_gym": lambda text: [answer_in(text, extract, "") for extract in EXTRACTS],
    "judge": _score,
    "judge, json_field": _json_score,
    "a text for the terminal": terminal_lines,
}


def cpu_seconds(read: Callable[[str], Any], text: str) -> float:
    began = time.process_time()
    with suppress(InvalidReply):
        read(text)
    return time.process_time() - began


def grows_with_the_text(
    read: Callable[[str], Any], text: Callable[[int], str], chars: int, at_once: float = AT_ONCE
) -> bool:
    """Return whether reading a text takes time in proportion to its length, or too little to tell."""
    if cpu_seconds(read, text(chars)) < at_once:
        return True
    whole, quarter = (min(cpu_seconds(read, text(length)) for _ in range(3)) for length in (chars, chars // 4))
    return whole < min(max(at_once, GROWTH * quarter), AT_MOST)


def adversarial(unit: str, chars: int = CHARS) -> str:
    """Return a text that repeats a unit, between others."""
    draw = random.Random(unit)
    before, beside, after = (draw.choice((*UNITS, "")) for _ in range(3))
    return (before + (unit + draw.choice(("", "", beside))) * chars)[:chars] + after


def test_every_registered_reward_is_read_here_or_reads_no_text():
    assert {*READERS, *NOT_READING} >= {*REWARDS.names()}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("reader", READERS)
def test_any_text_is_read_within_a_bound(reader: str):
    for unit in UNITS[::20] if reader in ("math", "geo3k") else UNITS:  # these limit their time, to a second each
        text = partial(adversarial, unit)
        assert grows_with_the_text(READERS[reader], text, CHARS), repr(text(40))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("reader", "begin", "unit"),
    [
        ("code", "", "```python\n"),
        ("code", "", "```a\n~~~b\n"),
        ("code", "`", "`"),
        ("judge", "score:", " "),
        ("judge", "score:", "*"),
        ("judge", "", "score: "),
        ("judge, json_field", "", "{"),
        ("judge, json_field", "", '{"'),
        ("judge, json_field", "", '{"a":'),
        ("judge, json_field", "", '{"a":1,'),
        ("a text for the terminal", "", "a-"),
        ("a text for the terminal", "?", "token"),
        ("a text for the terminal", "", "?token"),
    ],
)
def test_a_long_text_is_read_once(reader: str, begin: str, unit: str):
    assert grows_with_the_text(READERS[reader], lambda chars: (begin + unit * chars)[:chars], 400_000)


def test_a_reader_that_reads_again_from_each_character_is_found():
    def suffixes(text: str) -> int:
        return sum(text[start:].count("b") for start in range(len(text)))

    # 0.2 to 1 s on one machine or another: compared with itself on each, not taken for quick on a fast one.
    assert not grows_with_the_text(suffixes, lambda chars: "a" * chars, CHARS, at_once=AT_ONCE / 50)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("```python\na\n```", [("python", "a\n")]),
        ("  ~~~ py\na\n\n\t~~~ \nb\n```\n```", [("py", "a\n\n"), ("", "")]),
        ("```\n```py\na\n```", [("", "```py\na\n")]),
        ("```py title=x\na\n~~~\n```", [("py", "a\n~~~\n")]),
        ("````py\n```\na\n````", [("py", "```\na\n")]),
        ("````py\na\n```\n", [("", "a\n")]),
        ("```py\nunclosed\n~~~c++\na\n~~~\n", [("c++", "a\n")]),
        ("text ```py\na\n```", []),
        ("```py\na\n``` end", []),
        ("```py a", []),
    ],
)
def test_a_block_reaches_to_the_first_line_of_the_same_fence(text: str, blocks: list[tuple[str, str]]):
    assert code_blocks(text) == blocks


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://user:pass@host/x", "see https://***@host/x"),
        ("git+ssh://key@host", "git+ssh://***@host"),
        ("http://host/?a=1&my-token=abc&b=2", "http://host/?a=1&my-token=***&b=2"),
        ("?tokens-of-key=1", "?tokens-of-key=***"),
        ("?a=?token=x", "?a=?token=***"),
        ("http://host/?b=2 a@b ://", "http://host/?b=2 a@b ://"),
    ],
)
def test_credentials_in_addresses_are_hidden(text: str, shown: str):
    assert terminal_lines(text) == shown


def test_an_object_after_many_braces_is_found_and_a_reply_of_broken_ones_has_none():
    reader = ScoreReader(Kwargs("k"), None, "score", None)
    assert reader.score("\\frac{1}{2} {x} " * 2000 + '{"score": 3}') == 3
    with pytest.raises(InvalidReply, match="no JSON object"):
        reader.score('{"score": 3} ' + '{"a' * 2000)
