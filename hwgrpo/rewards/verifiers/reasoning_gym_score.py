"""The score that the package reasoning-gym gives a response to one of its tasks."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from typing import Any

from hwgrpo.errors import ConfigError, DataError, choice_error, error_text, quoted, shown
from hwgrpo.rewards.response_text import continued
from hwgrpo.rewards.verifiers.quantities import last_number, plain
from hwgrpo.rewards.verifiers.reasoning_gym_tasks import PREFIX, PackageMissing, parse_address
from hwgrpo.rewards.verifiers.stated_answer import after_thinking, boxed, tagged
from hwgrpo.values import Prompt

EXTRACTS = ("tag", "number", "text")
KEYS = ("address", "entry")
"""Fields of `extra_info` that the rows of `reasoning_gym://` have."""


def reasoning_gym(
    solution_str: str, extra_info: Any = None, extract: str = "tag", partial: bool = True, opened_markers: str = ""
) -> float:
    r"""Score the answer in a response with the package's `score_answer`, which gives partial credit in some tasks.

    Args:
        solution_str: the response.
        extra_info: the `address` and the `entry` of the row's task, as rows of `reasoning_gym://` have them.
        extract: "tag": the answer is in the last `<answer>...</answer>`, as in the package; "number": it is the last
            number after `</think>`, first of all that in `\boxed{}` or `<answer>`, in digits: 1000 for `1e3`, 0.5 for
            `1/2`; "text": it is all after `</think>`.
        partial: keep scores between 0 and 1, which many tasks give an answer that contains the right one; false makes
            them 0.
        opened_markers: markers at the prompt's end; an `<answer>` there counts as the response's.

    Returns:
        0 to 1. A response without an answer has what the package gives for None, mostly 0; an answer on which the
        package's scorer fails has 0.

    Raises:
        ConfigError: `extract` is unknown, or the package is missing.
        DataError: the row is none of `reasoning_gym://`.
    """
    check_arguments(extract=extract, partial=partial)
    dataset, entry = _task_of(extra_info)
    try:
        score = float(dataset.score_answer(answer_in(solution_str, extract, opened_markers), entry))
    except Exception:  # scorers raise on an answer of another form than they expect
        return 0.0
    return score if partial or score >= 1 else 0.0


def check_arguments(*, extract: str = "tag", partial: bool = True) -> None:
    """Raise `ConfigError` for an unknown `extract`, or a `partial` that is neither true nor false."""
    if extract not in EXTRACTS:
        raise choice_error("kwargs.extract of reward reasoning_gym", extract, EXTRACTS)
    if not isinstance(partial, bool):
        raise ConfigError(f"kwargs.partial={shown(partial)} of reward reasoning_gym must be true or false")


def check_prompt(prompt: Prompt, **_: Any) -> None:
    """Raise `DataError` for a row that the package cannot score, also with its own answer."""
    try:
        dataset, entry = _task_of(prompt.columns.get("extra_info"))
    except DataError as error:
        raise DataError(f"{prompt.place}: {error}") from error
    try:
        dataset.score_answer(entry["answer"], entry)
    except Exception as error:
        raise DataError(
            f"{prompt.place}: the package reasoning-gym cannot score the row's own answer: {error_text(error, 200)}"
        ) from error


setattr(reasoning_gym, "check_arguments", check_arguments)  # noqa: B010 - a function's attribute has no type
setattr(reasoning_gym, "check_prompt", check_prompt)  # noqa: B010


def answer_in(response: str, extract: str, opened: str) -> str | None:
    """Return the answer that a response states, or None; the arguments are those of `reasoning_gym`."""
    if extract == "tag":
        content = tagged(continued(response, opened, ["<answer>"]))
        return None if content is None else content.strip()
    text = after_thinking(response)
    if extract == "text":
        return text.strip()
    stated = boxed(text) or tagged(continued(text, opened, ["<answer>"])) or text
    return last_number(plain(stated))


def _task_of(extra_info: Any) -> tuple[Any, dict[str, Any]]:
    """Return the package's data set and the entry of a row.

    Raises:
        PackageMissing: the package cannot be imported.
        DataError: the row has none, or an address that is wrong.
    """
    if not isinstance(extra_info, Mapping) or not all(isinstance(extra_info.get(key), str) for key in KEYS):
        raise DataError(
            f"reward reasoning_gym scores rows of {PREFIX}..., which have an address and an entry in extra_info; this "
            f"row has extra_info={quoted(extra_info)}. Name such a task in data.train, or another reward"
        )
    try:
        entry = ast.literal_eval(extra_info["entry"])
    except (ValueError, SyntaxError, RecursionError) as error:
        raise DataError(
            f"extra_info.entry={quoted(extra_info['entry'])} is no entry: {error_text(error, 100)}"
        ) from error
    address = extra_info["address"]
    if not address.startswith(PREFIX):
        raise DataError(
            f"extra_info.address={quoted(address)} is no task of {PREFIX}...; name such a task in data.train, "
            "or another reward"
        )
    try:
        return _dataset(address), entry
    except PackageMissing:
        raise
    except ConfigError as error:
        raise DataError(f"extra_info.address={error}") from error


@functools.lru_cache(maxsize=64)
def _dataset(address: str) -> Any:
    return parse_address(address).dataset(1)
