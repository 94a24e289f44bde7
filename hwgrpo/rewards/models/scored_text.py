"""Prompt and response as a reward model reads them: in its own chat template, or plain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwgrpo.rewards.conversation import conversation
from hwgrpo.support.template_clock import clock_options
from hwgrpo.support.template_limit import template_limit
from hwgrpo.values import Prompt

TOO_LONG = ("fail", "left", "right")
"""What becomes of a text with too many tokens: it has no score, or loses tokens at its beginning or its end."""


class TooLong(ValueError):
    """A text has more tokens than the model reads."""


class ScoredText:
    """Tokens of a prompt and a response for one reward model.

    Args:
        tokenizer: the reward model's own.
        chat_template: whether its chat template is applied; None: if it has one.
        max_length: most tokens that the model reads; None: no limit.
        too_long: one of `TOO_LONG`.
        options: of the chat template, e.g. {"enable_thinking": False}.
        special_tokens: whether the tokenizer adds its own to text without a chat template.
        template_date: date that a chat template with a clock writes (`data.template_date`); None: the present.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: bool | None,
        max_length: int | None,
        too_long: str = "fail",
        *,
        options: Mapping[str, Any] | None = None,
        special_tokens: bool = True,
        template_date: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = bool(tokenizer.chat_template) if chat_template is None else chat_template
        self._max_length, self._too_long = max_length, too_long
        self._options = {**clock_options(template_date), **(options or {})}
        self._special_tokens = special_tokens

    def tokens(self, prompt: Prompt, response: str) -> list[int]:
        """Return the tokens of a prompt with a response.

        Raises:
            TooLong: they are more than `max_length`, and are not to be cut.
        """
        if self._chat:
            messages = conversation(prompt, response)
            with template_limit("a response for the reward model"):
                text = self._tokenizer.apply_chat_template(messages, tokenize=False, **self._options)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self._tokenizer(prompt.text + response, add_special_tokens=self._special_tokens)["input_ids"]
        limit = self._max_length
        if limit is None or len(ids) <= limit:
            return ids
        if self._too_long == "fail":
            raise TooLong(
                f"prompt and response have {len(ids)} tokens of the reward model's, above its max_length={limit}"
            )
        return ids[-limit:] if self._too_long == "left" else ids[:limit]
