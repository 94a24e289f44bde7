"""Short answers to questions, compared after SQuAD's normalization with each of the right ones."""

from __future__ import annotations

import collections
import re
import string
from typing import Any

from hwgrpo.rewards.ground_truths import TARGET, right_answers
from hwgrpo.rewards.verifiers.stated_answer import after_thinking, tagged

ARTICLE = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def question_exact_match(solution_str: str, ground_truth: Any, tag: str | None = "answer", score: float = 1.0) -> float:
    """Return `score` when the answer equals a ground truth after SQuAD's normalization, else 0.

    Args:
        solution_str: the response.
        ground_truth: a right answer or a list of them; verl's `{"target": ...}` too.
        tag: the answer is the content of the last `<tag>...</tag>`, of all text after `</think>` without one; null:
            always that text.
        score: reward of an equal answer.

    Raises:
        DataError: there is no right answer.

    Source: the evaluation script of SQuAD (arXiv 1606.05250).
    """
    answer = normalized(short_answer(solution_str, tag))
    return score if any(answer == normalized(truth) for truth in right_answers(ground_truth, TARGET)) else 0.0


def question_f1(solution_str: str, ground_truth: Any, tag: str | None = "answer") -> float:
    """Return the largest F1 over ground truths between the words of the answer and theirs, 0 to 1.

    Args:
        solution_str, ground_truth, tag: as for `question_exact_match`.

    Returns:
        2 precision recall / (precision + recall) of the words, counted as often as they occur in both; where one has
        no words, 1 if the other has none either.

    Raises:
        DataError: there is no right answer.

    Source: the evaluation scripts of SQuAD 1.1 and 2.0 (arXiv 1606.05250, 1806.03822).
    """
    words = normalized(short_answer(solution_str, tag)).split()
    return max(_f1(words, normalized(truth).split()) for truth in right_answers(ground_truth, TARGET))


def _f1(words: list[str], truth: list[str]) -> float:
    if not words or not truth:
        return float(words == truth)
    common = sum((collections.Counter(words) & collections.Counter(truth)).values())
    return 2 * common / (len(words) + len(truth))


def normalized(text: str) -> str:
    """Return a text in lower case without ASCII punctuation, articles and further white space."""
    return " ".join(ARTICLE.sub(" ", text.lower().translate(PUNCTUATION)).split())


def short_answer(text: str, tag: str | None) -> str:
    """Return the text of a response that is compared."""
    content = tagged(text, tag) if tag else None
    return after_thinking(text) if content is None else content
