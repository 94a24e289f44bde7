"""The prompt of a judge from a template, and the score in its reply."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwgrpo.errors import ConfigError, DataError, quoted
from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.rewards.conversation import prompt_text
from hwgrpo.rewards.ground_truths import shown_answers
from hwgrpo.rewards.services.concurrent_requests import InvalidReply
from hwgrpo.rewards.verifiers.quantities import plain_number
from hwgrpo.support.jsonlines import jsonable
from hwgrpo.values import Prompt

TEMPLATE = """Grade the response to the task below on a scale from 0 to 10.

<task>
{prompt}
</task>

<response>
{response}
</response>

Explain the grade in one sentence. Then write on a line of its own: score: <number>"""
PATTERN = (
    r"(?i)score[\"'*_`]{0,3}\s{0,4}(?:\([^()\n]{1,30}\)[*_`]{0,3}\s{0,4})?[:：=]"
    r"[\s\"'*_`$\\({\[<]{0,12}(?:boxed\{)?([-+−]?\.?\d[\d.,]*(?:e[-+−]?\d+)?(?:[-–—]\d+)?)"
)
"""The default: `score: 7`, `**Score**: 7.5`, `"score": 1e-1`, `Score (0-10): **.5**`. Repeats before the number are
bounded, so that it is found in linear time; a range is matched whole, and refused as no number."""
OBJECT = re.compile(r"\{\s*+[\"}]")
"""Where a JSON object may begin."""
MOST_BROKEN = 1000
"""Attempts to read an object that fail, before a reply counts as one without: each reads much of it."""
NAME = re.compile(r"\w+")


class Template:
    """A text with {prompt}, {response}, {ground_truth} and {column}; {{ and }} are braces.

    Args:
        text: the template.
        checks, name: of the argument that it comes from, for messages.

    Raises:
        ConfigError: it has a placeholder that is not just a name, or no {response} where that is needed.
    """

    def __init__(self, text: str, checks: Kwargs, name: str, *, needs_response: bool) -> None:
        checks.text(name, text)
        try:
            self._parts = [
                (literal, field, spec, form) for literal, field, spec, form in string.Formatter().parse(text)
            ]
        except ValueError as error:
            raise checks.error(name, text, f"is no template: {error}; write {{{{ and }}}} for braces") from error
        fields = [
            f"{field}{'!' + form if form else ''}{':' + spec if spec else ''}"
            for _, field, spec, form in self._parts
            if field is not None
        ]
        for each in fields:
            if not NAME.fullmatch(each):
                raise checks.error(
                    name, text, f"has {{{each}}}: placeholders are just names; write {{{{ and }}}} for braces"
                )
        if needs_response and "response" not in fields:
            raise checks.error(name, text, "has no {response}, so that all responses would get the same score")
        self._name = name

    def fill(self, prompt: Prompt, response: str) -> str:
        """Return the text for a response.

        Raises:
            ConfigError: the data has no such column.
            DataError: the row's ground truth, which the template wants, is missing or of no known form.
        """
        values = {"prompt": prompt_text(prompt), "response": response}
        filled = []
        for literal, field, _, _ in self._parts:
            filled.append(literal)
            if field is None:
                continue
            if field == "ground_truth":
                filled.append(_truth_text(prompt))
                continue
            if field not in values and field not in prompt.columns:
                raise ConfigError(
                    f"judge: {self._name} has {{{field}}}, and the data has no such column; it has: prompt, response, "
                    f"ground_truth, {', '.join(sorted(prompt.columns))}"
                )
            value = values[field] if field in values else prompt.columns[field]
            filled.append(value if isinstance(value, str) else json.dumps(jsonable(value), ensure_ascii=False))
        return "".join(filled)


def _truth_text(prompt: Prompt) -> str:
    try:
        return shown_answers(prompt.ground_truth)
    except DataError as error:
        raise DataError(f"{prompt.place or f'prompt {prompt.uid}'}: {error}") from error


def template_text(checks: Kwargs, template: str | None, template_file: str | None) -> tuple[str, str]:
    """Return a judge's template and the name of the argument that it comes from; `TEMPLATE` without one."""
    if template is not None and template_file is not None:
        raise checks.error("template_file", template_file, "and template exclude each other: remove one of them")
    if template_file is None:
        return TEMPLATE if template is None else template, "template"
    checks.text("template_file", template_file)
    try:
        return Path(template_file).expanduser().read_text(encoding="utf-8"), "template_file"
    except (OSError, UnicodeDecodeError) as error:
        raise checks.error("template_file", template_file, f"cannot be read: {error}") from error


class ScoreReader:
    """Reads the score in a judge's reply.

    Args:
        checks: of the judge's arguments.
        pattern: regular expression whose first group, in its last match, is the score.
        json_field: the reply is, or ends with, a JSON object, and this field of it the score; None: use the pattern.
        score_range: [lowest, highest]; a score outside is an invalid reply. None: any.

    Raises:
        ConfigError: one of them is wrong.
    """

    def __init__(self, checks: Kwargs, pattern: str | None, json_field: str | None, score_range: Any) -> None:
        if json_field is not None and pattern is not None:
            raise checks.error("json_field", json_field, "and pattern exclude each other: remove one of them")
        if json_field is not None:
            checks.text("json_field", json_field)
        try:
            self._pattern = re.compile(PATTERN if pattern is None else pattern)
        except (re.error, TypeError) as error:
            raise checks.error("pattern", pattern, f"is no regular expression: {error}") from error
        if self._pattern.groups < 1:
            raise checks.error("pattern", pattern, "needs a group around the score, as in 'score: (\\d+)'")
        self._field = json_field
        self._range: tuple[float, float] | None = None
        if score_range is not None:
            pair = list(score_range) if isinstance(score_range, list | tuple) else []
            numbers = [each for each in pair if isinstance(each, int | float) and not isinstance(each, bool)]
            if len(pair) != 2 or len(numbers) != 2 or numbers[0] >= numbers[1]:
                raise checks.error("score_range", score_range, "must be [lowest, highest]")
            self._range = numbers[0], numbers[1]

    def score(self, reply: str) -> float:
        """Return the score in a reply.

        Raises:
            InvalidReply: there is none, or it is out of range.
        """
        value = self._by_pattern(reply) if self._field is None else self._by_field(reply, self._field)
        if not math.isfinite(value):
            raise InvalidReply(f"the score {value} is not finite")
        if self._range is not None and not self._range[0] <= value <= self._range[1]:
            raise InvalidReply(f"the score {value:g} is outside of score_range {list(self._range)}")
        return value

    def _by_pattern(self, reply: str) -> float:
        matches = list(self._pattern.finditer(reply))
        if not matches:
            raise InvalidReply(f"no score in the reply {quoted(reply, 200)}")
        found = matches[-1][1]
        number = None if found is None else plain_number(found)
        if number is None:
            raise InvalidReply(f"the score {found!r} in the reply is no number")
        return number

    def _by_field(self, reply: str, field: str) -> float:
        found = last_object(reply)
        if found is None or field not in found:
            raise InvalidReply(f"no JSON object with {field!r} in the reply {quoted(reply, 200)}")
        value = found[field]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidReply(f"{field!r} in the reply is no number but {quoted(value)}")
        return as_float(value)


def as_float(value: float) -> float:
    """Return a number of JSON as a float; infinite where it is an integer that no float can be."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def last_object(reply: str) -> Mapping[str, Any] | None:
    """Return the last JSON object in a text that is not part of another; None without one, or after `MOST_BROKEN`."""
    decoder, found, broken = json.JSONDecoder(), None, 0
    begin = OBJECT.search(reply)
    while begin is not None and broken < MOST_BROKEN:
        try:
            found, end = decoder.raw_decode(reply, begin.start())
        except (ValueError, RecursionError):
            broken, end = broken + 1, begin.start() + 1
        begin = OBJECT.search(reply, end)
    return found if begin is None else None
