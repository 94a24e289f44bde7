"""Steps of a response: where they end in its text, with which of its tokens, and the sums of their rewards."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hwgrpo import user_code
from hwgrpo.errors import ConfigError, RewardError, quoted
from hwgrpo.ragged import offsets_of
from hwgrpo.rewards.failure_policy import FunctionValues
from hwgrpo.rewards.response_text import ResponseDecoder
from hwgrpo.rewards.trajectory_outcomes import TurnFinder
from hwgrpo.user_code import describe_error
from hwgrpo.values import NO_ROW, Completions, StepRewards

INCOMPLETE = "\ufffd"
"""What tokenizers decode the bytes of an incomplete character to."""


class StepFinder:
    """Finds the steps of responses as `algorithm.process` says.

    Args:
        config: the section `algorithm.process` (`ProcessConfig`).
        tokenizer: the one that decodes the responses.
        skip_special_tokens: as the responses were decoded.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, config: Any, tokenizer: Any, skip_special_tokens: bool = False) -> None:
        self._decode = ResponseDecoder(tokenizer, skip_special_tokens)
        self._function: Callable[[str], Any] | None = None
        self._name = config.function
        if config.function is not None:
            self._function = user_code.load_function(config.function, "algorithm.process.function")
        self._pattern = re.compile(config.pattern or re.escape(config.delimiter))

    def ends(self, text: str) -> list[int]:
        """Return the characters after which the steps of a response end, ascending; the last is its length.

        A response has at least one step. What is only white space between two delimiters belongs to the step before.

        Raises:
            RewardError: the user's function fails, or returned other than ascending positions in the text.
        """
        if self._function is None:
            return separated(text, self._pattern)
        try:
            found = [int(end) for end in self._function(text)]
        except Exception as error:
            raise RewardError(f"algorithm.process.function={self._name!r} {describe_error(error)}") from error
        if any(not low < high for low, high in zip([0, *found], [*found, len(text) + 1], strict=True)):
            raise RewardError(
                f"algorithm.process.function={self._name!r} must return the ascending ends of steps in a text of "
                f"{len(text)} characters, from 1 to {len(text)}; it returned {quoted(found, 200)}"
            )
        return [*found[:-1], len(text)] if found else [len(text)]

    needs_lists = True
    """Whether a reward function has to return rewards of steps."""

    def all_token_ends(self, completions: Completions) -> list[list[int]]:
        """Return `token_ends` of each response.

        Raises:
            ConfigError: a trajectory forked into rows.
        """
        if completions.row_starts is not None and bool(completions.row_starts.ne(NO_ROW).any()):
            raise ConfigError(
                "algorithm.process.steps=text: the chat template rewrites earlier turns, so that a trajectory has "
                "several rows, and its text is not one run of tokens; set algorithm.process.steps=turns"
            )
        responses = zip(completions.texts, completions.token_lists(), strict=True)
        return [self.token_ends(text, tokens) for text, tokens in responses]

    def states(self, completions: Completions, counts: Sequence[int]) -> None:
        """Return None: steps of a text are taken in no state of an environment."""

    def token_ends(self, text: str, tokens: Sequence[int]) -> list[int]:
        """Return the index of the last token of each step of `ends(text)`, not descending; -1 without tokens."""
        return last_tokens(self.ends(text), tokens, self._decode)


def separated(text: str, delimiter: re.Pattern[str]) -> list[int]:
    """Return the ends of the steps between the matches of a delimiter, which belongs to the step before it."""
    ends: list[int] = []
    start = 0
    for match in delimiter.finditer(text):
        if text[start : match.start()].strip():
            ends.append(match.end())
        elif ends:
            ends[-1] = match.end()
        start = match.end()
    if text[start:].strip() or not ends:
        return [*ends, len(text)]
    return [*ends[:-1], len(text)]


def last_tokens(ends: Sequence[int], tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return for each step the index of the token that completes its last character; the last step has the last token.

    A character may be spread over several tokens (byte-level BPE), and a token may end a step and begin the next: it
    then belongs to the step that it ends. Text is decoded from a token that follows a complete character, with one
    token before what is measured, since some tokenizers decode the first token without its space.

    Args:
        ends: characters after which the steps end, ascending.
        tokens: the response.
        decode: tokens -> text.
    """

    def complete(first: int, stop: int) -> int:
        return len(decode(tokens[first:stop]).rstrip(INCOMPLETE))

    found: list[int] = []
    first, before, low = 0, 0, 0  # `before`: characters of the response minus those decoded from `first`
    for end in ends[:-1]:
        width, high = 1, max(low, 1)
        while high < len(tokens) and before + complete(first, high) < end:
            low, high, width = high + 1, min(high + width, len(tokens)), 2 * width
        low = min(low, high)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if before + complete(first, middle) >= end else (middle + 1, high)
        found.append(high - 1)
        low = high
        if high - 1 > first and not decode(tokens[first : high - 1]).endswith(INCOMPLETE):
            before += complete(first, high) - complete(high - 1, high)
            first = high - 1
    return [*found, len(tokens) - 1]


class StepTotals:
    """Sums the rewards of the steps of a batch's responses over reward functions.

    A list that a function returns has a reward for each step; one number is the reward of the last step.
    """

    def __init__(self, finder: StepFinder | TurnFinder, completions: Completions) -> None:
        self._ends = finder.all_token_ends(completions)
        self.counts = [len(ends) for ends in self._ends]
        """Number of steps of each response."""
        self._states, self._needs_lists = finder.states(completions, self.counts), finder.needs_lists
        self._sums = [[0.0] * count for count in self.counts]
        self._listed = self._failed = False

    def add(self, result: FunctionValues, setting: Any) -> None:
        """Add the rewards of one function."""
        self._listed |= bool(result.steps)
        self._failed |= bool(result.failures)
        numbers = torch.where(result.replaced, setting.failure_value, result.values.nan_to_num(0.0)).tolist()
        for sample, (sums, number) in enumerate(zip(self._sums, numbers, strict=True)):
            for step, reward in enumerate(result.steps.get(sample, ())):
                sums[step] += setting.weight * reward
            if sample not in result.steps:
                sums[-1] += setting.weight * number

    def rewards(self, valid: torch.Tensor, *, scored: bool = True) -> StepRewards:
        """Return the sums; 0 where `valid` [S] is False.

        Args:
            valid: [S] bool.
            scored: whether the functions were called with any response.

        Raises:
            RewardError: no function returned a list for any response, though none failed.
        """
        if self._needs_lists and scored and self.counts and not self._listed and not self._failed:
            raise RewardError(
                "algorithm.advantage.name=process needs the rewards of steps, but every reward function returned one "
                "number per response; return a list with one number for each step, or use grpo"
            )
        kept = valid.tolist()
        sums = [reward if ok else 0.0 for ok, steps in zip(kept, self._sums, strict=True) for reward in steps]
        return StepRewards(
            torch.tensor(sums, dtype=torch.float64),
            torch.tensor([end for ends in self._ends for end in ends], dtype=torch.int64),
            offsets_of(torch.tensor(self.counts, dtype=torch.int64)),
            self._states,
        )
