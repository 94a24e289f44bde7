"""The letter that a response chooses among options."""

from __future__ import annotations

import re
import string
from typing import Any

from hwgrpo.errors import ConfigError, DataError, quoted
from hwgrpo.rewards.ground_truths import right_answers
from hwgrpo.rewards.verifiers.stated_answer import after_thinking

NOUN = r"(?:(?:the )?(?:option|choice|letter) )?"
STATEMENT = re.compile(
    rf"(?:\b(?:answer|choice|option)\b(?:[^.:;,\n]{{0,40}}? (?:is|was|be)\b)? ?[:=]? ?{NOUN}|\\boxed ?\{{ ?|<answer> ?)"
    r"(?:\\(?:text|textbf|mathrm|mathbf) ?\{ ?)?",
    re.IGNORECASE,
)
"""What stands before the letter; `_stated` refuses a bare "option"."""
BARE = re.compile(rf"(?:answer|choice|option) {NOUN}", re.IGNORECASE)
LETTER = re.compile(r"([(\[]?) ?([A-Za-z])(?![\w'+\-*^=]) ?([)\]]?)")
SEPARATOR = re.compile(r" ?(?:[,/&] ?(?:or |and )?|or |and )")
END = re.compile(r" ?(?:$|[.,;:)\]}/<&]|or\b|and\b)")
LINE_END = re.compile(r" ?[.!]? ?(?:$|[}<])")
SENTENCE = re.compile(r" (?!(?:and|as|because|but|by|due|for|from|given|is|or|since|so|where|which|with)\b)[a-z]")
"""What follows "A" and "I" where they are words: "A dog", "I think"."""
ALONE = re.compile(r"[(\[]? ?([A-Za-z]) ?[)\]]?[.:]?")
WITH_TEXT = re.compile(r"[(\[]?([A-Z])[)\].:] \S.*")
MARKUP = str.maketrans("", "", '*`$"“”')


def multiple_choice(solution_str: str, ground_truth: Any, options: int = 26, score: float = 1.0) -> float:
    r"""Compare the letter that the response chooses with the ground truth's.

    The choice is in the last line with a statement, as in `The answer is (B)`, `Answer: B`, `\boxed{B}`,
    `<answer>B</answer>`; without any, it is the last line if that is only a letter, `B.`, or the only line if it starts
    with one, `B) Paris`. Several letters in that line (`A or B`) are no choice. Lower case counts in parentheses and at
    the end of the line. Text before `</think>` is ignored.

    Args:
        solution_str: the response.
        ground_truth: the letter, as in `B`, `(b)` or `B) Paris`; of a list any.
        options: number of options, A to at most Z; other letters are no choice.
        score: reward of the right letter.

    Returns:
        `score`, or 0.

    Raises:
        DataError: the ground truth is none of the options.
        ConfigError: `options` is not in 2 to 26.
    """
    if not 2 <= options <= len(string.ascii_uppercase):
        raise ConfigError(f"kwargs.options={options} of reward multiple_choice; allowed: 2 to 26")
    letters = string.ascii_uppercase[:options]
    truths = [_truth(answer, letters) for answer in right_answers(ground_truth)]
    return score if chosen_letter(solution_str, letters) in truths else 0.0


def chosen_letter(text: str, letters: str) -> str | None:
    """Return the letter among `letters` that a response chooses, None where it chooses none or several."""
    text = after_thinking(text).translate(MARKUP).replace("\\(", "(").replace("\\)", ")")
    text = re.sub(r"<answer>\s+", "<answer>", text)
    lines = [line for each in text.splitlines() if (line := " ".join(each.split()))]
    for line in reversed(lines):
        stated = _stated(line, letters)
        if stated:
            return stated.pop() if len(stated) == 1 else None
    alone = ALONE.fullmatch(lines[-1]) if lines else None
    if alone is None and len(lines) == 1:
        alone = WITH_TEXT.fullmatch(lines[0])
    letter = alone[1].upper() if alone else None
    return letter if letter and letter in letters else None


def _stated(line: str, letters: str) -> set[str]:
    """Return the letters that the statements of a line name."""
    stated: set[str] = set()
    for statement in STATEMENT.finditer(line):
        if BARE.fullmatch(statement[0]):
            continue  # "option A is wrong" states nothing
        item = LETTER.match(line, statement.end())
        if item is None or not _is_choice(line, item, letters):
            continue
        stated.add(item[2].upper())
        while (separator := SEPARATOR.match(line, item.end())) and (item := LETTER.match(line, separator.end())):
            if not (_is_choice(line, item, letters) and END.match(line, item.end())):
                break
            stated.add(item[2].upper())
    return stated


def _is_choice(line: str, item: re.Match[str], letters: str) -> bool:
    letter, wrapped = item[2], bool(item[1] and item[3])
    if letter.upper() not in letters:
        return False
    if wrapped:
        return True
    if letter.islower():
        return LINE_END.match(line, item.end()) is not None
    return letter not in "AI" or SENTENCE.match(line, item.end(2)) is None


def _truth(answer: str, letters: str) -> str:
    text = " ".join(answer.split())
    found = ALONE.fullmatch(text) or WITH_TEXT.fullmatch(text)
    if found and found[1].upper() in letters:
        return found[1].upper()
    raise DataError(
        f"the ground truth {quoted(answer)} is none of the letters A to {letters[-1]}; kwargs.options of reward "
        "multiple_choice is the number of options"
    )
