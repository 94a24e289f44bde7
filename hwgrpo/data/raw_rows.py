"""Rows as datasets publish them -> examples: prompt, ground truth and further columns. One function per form."""

from __future__ import annotations

import builtins
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hwgrpo.data.final_answers import last_boxed, number_after_mark
from hwgrpo.data.formats import Row
from hwgrpo.data.image_rows import PLACE
from hwgrpo.data.images import ImageReader, images_in
from hwgrpo.data.row_schema import Message, ground_truth_key, message_text, read_ground_truth, read_prompt
from hwgrpo.errors import DataError, quoted
from hwgrpo.rewards.ground_truths import is_missing, right_answers
from hwgrpo.support.jsonlines import jsonable

GroundTruth = str | list[str] | None
TURN = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}
HIDDEN = "<unk>"
"""TriviaQA's answer where it is not published."""


@dataclass(frozen=True)
class Example:
    """A row to train on."""

    prompt: str | Sequence[Message]
    """Text, or the messages of a conversation."""
    ground_truth: GroundTruth
    """What the reward compares with; None where rewards need none."""
    info: Mapping[str, str] = field(default_factory=dict)
    """Further fields of `extra_info`."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns."""


def column_of(columns: Any, names: str) -> str | None:
    """Return the first of `names`, as in `question|query`, that is among columns."""
    return next((name for name in names.split("|") if name in columns), None)


def text(row: Row, names: str) -> str:
    """Return a text column.

    Args:
        row: the row.
        names: its name, or several with `|` between them, of which the first present counts.

    Raises:
        DataError: it is missing, empty or no text.
    """
    value = _value(row, names)
    if not isinstance(value, str):
        raise DataError(f"{names!r} is no text")
    if not value.strip():
        raise DataError(f"{names!r} is empty")
    return value


def gsm8k(row: Row) -> Example:
    """Read `question` and `answer`, a solution with the number after `####`."""
    question, solution = text(row, "question"), text(row, "answer")
    return Example(question, number_after_mark(solution), {"answer": solution, "question": question})


def math(row: Row) -> Example:
    """Read `problem` and `solution`, with the answer in the last `\\boxed{}`."""
    question, solution = text(row, "problem"), text(row, "solution")
    return Example(question, last_boxed(solution), {"answer": solution, "question": question})


def geo3k(row: Row) -> Example:
    """Read `problem`, with `<image>` where each image stands, `answer`, and `images`, dicts of `bytes` and `path`."""
    from hwgrpo.config.schema import DataImagesConfig

    question, answer = text(row, "problem"), text(row, "answer").strip()
    listed = images_in(_value(row, "images"))
    if not listed:
        raise DataError("'images' is empty")
    if not all(isinstance(each, Mapping) and isinstance(each.get("bytes"), bytes) for each in listed):
        raise DataError("'images' has an image without bytes; read the dataset's Parquet files")
    ImageReader(DataImagesConfig()).read_all(listed, Path(), "row")  # broken ones are found now
    places = question.count(PLACE)
    if places not in (0, len(listed)):
        raise DataError(f"the problem has {places} times {PLACE}, and the row has {len(listed)} images")
    images = [{"bytes": each["bytes"], "path": each.get("path")} for each in listed]
    shown = question if places else PLACE * len(listed) + question
    return Example(shown, answer, {"answer": answer, "question": question}, {"images": images})


def short_solution(row: Row) -> Example:
    """Read `prompt` and `solution`, which is only the answer."""
    return Example(text(row, "prompt"), text(row, "solution").strip())


def own_columns(prompt_key: str, answer_key: str | None) -> Callable[[Row], Example]:
    """Return the function for rows that name their columns.

    Args:
        prompt_key: column with the prompt: text or chat messages.
        answer_key: column with the ground truth, with dots for a nested one: text, a number, a list of accepted
            answers, or anything else, which becomes JSON; None is the first of the usual columns, "" no ground truth.
    """

    def example(row: Row) -> Example:
        prompt = read_prompt({**row, prompt_key: _value(row, prompt_key)}, prompt_key, "row")
        if not isinstance(prompt, str):
            prompt = [_plain(message) for message in prompt]
        key = ground_truth_key(row) if answer_key is None else answer_key
        if key is None:
            raise DataError("no ground truth in the usual columns; --answer-key names its column ('' for none)")
        return Example(prompt, None if key == "" else _ground_truth(row, key))

    return example


def _plain(message: Message) -> dict[str, str]:
    others = sorted(set(message) - {"role", "content"})
    if others:
        raise DataError(f"a message of the prompt has {quoted(others[0])}; converted ones have role and content alone")
    return {"role": message["role"], "content": message_text(message)}


def _ground_truth(row: Row, key: str) -> GroundTruth:
    value = read_ground_truth(row, key, "row") if "." in key else _value(row, key)
    if is_missing(value):
        raise DataError(f"{key!r} is missing")
    listed = isinstance(value, list)
    if any(isinstance(each, Mapping | list) for each in (value if listed else [value])):
        return json.dumps(jsonable(value), ensure_ascii=False)
    answers = right_answers(value)
    if not listed and not answers[0].strip():
        raise DataError(f"{key!r} is empty")
    return answers if listed else answers[0]


def preference(row: Row) -> Example:
    """Read two transcripts, `chosen` and `rejected`, which differ in their last response.

    The prompt is what they share, up to the last turn of the user; the rest are the columns `chosen` and `rejected`.
    """
    chosen, rejected = (_turns(row, column) for column in ("chosen", "rejected"))
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) == len(rejected):
        raise DataError("'chosen' and 'rejected' are equal")
    while shared and chosen[shared - 1]["role"] != "user":
        shared -= 1
    if not shared:
        raise DataError("'chosen' and 'rejected' do not begin with the same turn of the user")
    responses = {"chosen": chosen[shared:], "rejected": rejected[shared:]}
    for column, messages in responses.items():
        if not messages or not all(message["content"] for message in messages):
            raise DataError(f"the response of {column!r} is empty")
    return Example(chosen[:shared], None, columns=responses)


def _turns(row: Row, column: str) -> list[dict[str, str]]:
    """Return the messages of `\\n\\nHuman: ...\\n\\nAssistant: ...`, with consecutive turns of one role joined."""
    before, *parts = TURN.split("\n\n" + text(row, column).lstrip())
    if before.strip() or not parts:
        raise DataError(f"{column!r} does not begin with 'Human:' or 'Assistant:'")
    turns: list[dict[str, str]] = []
    for speaker, said in zip(parts[::2], parts[1::2], strict=True):
        if turns and turns[-1]["role"] == ROLES[speaker]:
            turns[-1]["content"] = f"{turns[-1]['content']}\n\n{said.strip()}".strip()
        else:
            turns.append({"role": ROLES[speaker], "content": said.strip()})
    return turns


def options(row: Row) -> Example:
    """Read `context`, a question, its options, and the number of the right one from 0, or its letter."""
    listed = _texts(row, "answers|options")
    if not 2 <= len(listed) <= len(string.ascii_uppercase):
        raise DataError(f"{len(listed)} options; a letter names one of 2 to {len(string.ascii_uppercase)}")
    letters = string.ascii_uppercase[: len(listed)]
    label = str(_value(row, "label|correct_option")).strip()
    if label.isascii() and label.isdigit() and int(label) < len(listed):
        letter = letters[int(label)]
    elif len(label) == 1 and label.upper() in letters:
        letter = label.upper()
    else:
        raise DataError(f"the right option {quoted(label)} is none of the {len(listed)} options")
    lines = [f"{name}. {option.strip()}" for name, option in zip(letters, listed, strict=True)]
    parts = [text(row, "context").strip(), text(row, "question|query").strip(), "\n".join(lines)]
    return Example("\n\n".join(parts), letter)


def accepted_answers(row: Row) -> Example:
    """Read `question` and `answer`, with its `value` and `aliases`; all are accepted."""
    answer = _value(row, "answer")
    if not isinstance(answer, Mapping):
        raise DataError("'answer' has no fields 'value' and 'aliases'")
    answers = [answer.get("value"), *(answer.get("aliases") or ())]
    accepted = [each.strip() for each in answers if isinstance(each, str) and each.strip() not in ("", HIDDEN)]
    if not accepted:
        raise DataError("no accepted answer")
    return Example(text(row, "question").strip(), list(dict.fromkeys(accepted)))


def function_to_complete(row: Row) -> Example:
    """Read `prompt`, the head of the function `entry_point`, and `test`, which defines `check(candidate)`."""
    tests = {name: text(row, name) for name in ("test", "entry_point")}
    return Example(f"```python\n{text(row, 'prompt').rstrip()}\n```", json.dumps(tests), _solution(row))


def function_with_asserts(row: Row) -> Example:
    """Read a task in prose and `test_list`, asserts from which the model also learns the function's name."""
    tests: dict[str, Any] = {"test_list": _texts(row, "test_list")}
    if not tests["test_list"]:
        raise DataError("'test_list' is empty")
    tests |= {name: row[name] for name in ("test_setup_code", "test_imports") if row.get(name)}
    defined = re.findall(r"^def (\w+)", _solution(row)["solution"], re.MULTILINE)
    shown = "\n".join(tests["test_list"])
    for name in defined:
        if hasattr(builtins, name) and f"{name}(" in shown:
            tests["entry_point"] = name  # the tests mean it, and not the built-in function, e.g. sum
    task = text(row, "text|prompt").strip()
    return Example(f"{task}\n\nThese tests must pass:\n```python\n{shown}\n```", json.dumps(tests), _solution(row))


def _solution(row: Row) -> dict[str, str]:
    name = column_of(row, "canonical_solution|code")
    return {"task_id": str(row.get("task_id", "")), "solution": "" if name is None else str(row[name])}


def _value(row: Row, names: str) -> Any:
    name = column_of(row, names)
    if name is None or row[name] is None:
        raise DataError(f"{names!r} is missing")
    return row[name]


def _texts(row: Row, names: str) -> list[str]:
    value = _value(row, names)
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(each, str) for each in value):
        raise DataError(f"{names!r} is no list of texts")
    return list(value)
