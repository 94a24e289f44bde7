"""Rule-based rewards: equality, the format, the length."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from hwgrpo.errors import ConfigError
from hwgrpo.rewards.ground_truths import right_answers
from hwgrpo.rewards.response_text import continued
from hwgrpo.values import Completions, PromptBatch


def exact_match(solution_str: str, ground_truth: Any) -> float:
    """Return 1 when the response equals a ground truth after stripping white space, else 0."""
    return float(solution_str.strip() in [answer.strip() for answer in right_answers(ground_truth)])


def format_reward(
    solution_str: str,
    pattern: str | None = None,
    tags: Sequence[str] = ("think", "answer"),
    score: float = 1.0,
    opened_markers: str = "",
) -> float:
    """Return `score` when the full response has the required format, else 0.

    Args:
        solution_str: the response; white space around it is ignored.
        pattern: regular expression for the full response, `.` matching line ends too; None uses `tags`.
        tags: the response is `<tag>...</tag>` for each of these in order, each once, with only white space between.
        score: reward of the required format.
        opened_markers: markers at the prompt's end; those that `tags` or `pattern` name count as the response's.
    """
    text = continued(solution_str, opened_markers, pattern or [f"<{tag}>" for tag in tags])
    return score if _form(pattern, tuple(tags)).fullmatch(text.strip()) else 0.0


@functools.lru_cache
def _form(pattern: str | None, tags: tuple[str, ...]) -> re.Pattern[str]:
    if pattern is None:
        names = [re.escape(tag) for tag in tags]
        body = rf"(?:(?!</?(?:{'|'.join(names)})>).)*"
        pattern = r"\s*".join(f"<{name}>{body}</{name}>" for name in names)
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"kwargs.pattern={pattern!r} of reward format is no regular expression: {error}") from error


def length_reward(
    batch: PromptBatch,
    completions: Completions,
    *,
    max_response_tokens: int,
    buffer: int | None = None,
    factor: float = 1.0,
    floor: bool = True,
) -> list[float]:
    """Penalize responses near the length limit: 0 up to `max - buffer`, then linear to -factor at `max`.

    Args:
        batch: the prompts, unused.
        completions: the responses; lengths include the stop token; of a trajectory its longest row counts.
        max_response_tokens: the limit; `rollout.max_response_tokens` unless stated.
        buffer: tokens over which the penalty grows; None uses a quarter of the limit.
        factor: penalty at the limit.
        floor: keep -factor beyond the limit (TRL, OpenRLHF) instead of a growing penalty (verl).

    Returns:
        One number <= 0 per response. DAPO (arXiv 2503.14476), equation 13.
    """
    buffer = max_response_tokens // 4 if buffer is None else buffer
    if not 0 < buffer <= max_response_tokens:
        raise ConfigError(
            f"kwargs.buffer={buffer} of reward length; allowed: 1 to max_response_tokens={max_response_tokens}"
        )
    over = (completions.longest_rows - (max_response_tokens - buffer)).clamp(min=0, max=buffer if floor else None)
    return [-factor * tokens / buffer for tokens in over.tolist()]
