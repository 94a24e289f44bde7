"""The tokens between two turns of the policy, by the model's chat template: what was sampled is never tokenized again.

The template renders a turn with a marker in place of the policy's words, alone and followed by the new messages. What
stands behind the marker is the end of the turn, the messages, and the beginning of the next turn. Where the template
writes earlier turns differently when others follow, the conversation is rendered as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from hwgrpo.data.observed_images import ObservedImages, shows_images, without_images
from hwgrpo.data.prompt_findings import without_space
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.values import PromptImages

Message = Mapping[str, Any]
MARK = "qz7mark"
"""Words of the policy; no template has them."""
SEEN = "qz8seen"
"""Content of a message that is looked for."""
QUESTION: Message = {"role": "user", "content": "question"}


class HistoryRefused(ConfigError):
    """A history that the chat template rewrites cannot be read by the policy."""


class Render(Protocol):
    """The chat template: a conversation -> text."""

    def __call__(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the text, at whose end the next message of the assistant may be begun.

        Raises:
            DataError: the template refuses the conversation.
        """
        ...


class TurnTemplate:
    """The chat template between turns.

    Args:
        render: the chat template.
        tokenizer: the model's, of transformers.
        end_ids: tokens that end a turn.
        images: reads those of messages; None: the model reads text alone.
    """

    def __init__(
        self, render: Render, tokenizer: Any, end_ids: Collection[int], images: ObservedImages | None = None
    ) -> None:
        self._render, self._tokenizer, self._end_ids, self._images = render, tokenizer, end_ids, images
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        self._shown: set[tuple[str, ...]] = set()
        """Roles of messages that the template shows after a turn."""

    def between(
        self,
        sampled: Sequence[int],
        finished: bool,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int] | None:
        """Return the tokens from the end of a sampled turn to the beginning of the next one.

        None: the template shows every turn differently when these messages follow.

        Args:
            sampled: tokens of the turn.
            finished: whether a stop token or string ended it. A special token is the template's end of the turn, or
                stands for it; one with text (of `rollout.stop_token_ids`, such as `</tool_call>`) comes before it, as a
                stop string.
            messages: messages that follow, such as a tool's or the user's.
            tools: JSON schemas of the tools that the template shows.

        Raises:
            ConfigError: the template refuses these messages, or leaves one of them out.
            DataError: the model reads images, and a text has the mark of one.
        """
        self._check_shown(messages, tools)
        text = self._text(messages, tools)
        if self._images is not None:  # a placeholder without pixels would be embedded as text
            contents = "".join(str(message.get("content")) for message in messages)
            self._images.check_marks(contents if text is None else text, 0, "an observation")
        if text is None:
            return None
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens[self._sampled_of(tokens, sampled, finished) :]

    def between_with_images(
        self,
        sampled: Sequence[int],
        finished: bool,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[list[int], PromptImages]:
        """Return the tokens between turns, as `between` does, of messages with images, and the images.

        Raises:
            ConfigError: as `between` does, or the template shows every turn differently when these messages follow.
            DataError: the model reads text alone, or an image cannot be read or is not allowed.
        """
        if self._images is None:
            raise DataError("it has images, and the model reads text alone")
        bare = [without_images(message) for message in messages]
        pictures = self._images.read(messages, "an observation")
        self._check_shown(bare, tools)
        text = self._text(bare, tools)
        if text is None:
            raise ConfigError(
                f"{self.rewrites(bare, tools)}, and they have images, which a history that is rewritten does not show; "
                "set model.chat_template to a template that only appends"
            )
        tokens, images = self._images.encode(text, pictures, "an observation")
        left_out = self._sampled_of(tokens, sampled, finished)
        axes = None if images.axes is None else images.axes[left_out:] - left_out
        return tokens[left_out:], replace(images, axes=axes)

    def shows(self, messages: Sequence[Message]) -> bool:
        """Return whether the template shows messages behind a turn, with blocks `{"type": "image"}` as images."""
        try:
            if not shows_images(messages):
                return self.between([0], False, messages) is not None
            text = self._text(messages, ())
            if text is None or self._images is None:
                return False
            self._images.check_marks(text, sum(len(message["content"]) for message in messages), "a message")
        except (ConfigError, DataError):
            return False
        return True

    def _sampled_of(self, tokens: Sequence[int], sampled: Sequence[int], finished: bool) -> int:
        """Return how many of the tokens behind a turn were sampled as its end: 0 or 1."""
        if not tokens or not finished or not sampled or sampled[-1] not in self._end_ids:
            return 0
        stands_for_it = self.has_end(sampled, finished) and tokens[0] in self._special
        return int(stands_for_it or tokens[0] == sampled[-1])

    def has_end(self, sampled: Sequence[int], finished: bool) -> bool:
        """Return whether the last token of a sampled turn is a special token that ended it, not one with text."""
        return finished and len(sampled) > 0 and sampled[-1] in self._end_ids and sampled[-1] in self._special

    def rewritten(
        self,
        before: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        read: Callable[[], str] | None,
    ) -> str | None:
        """Return a conversation's text up to the next turn where the template rewrites what the policy has read.

        What the template writes of the last turn alone, such as an empty reasoning, need not have been read.

        Args:
            before: the conversation up to the policy's last turn.
            messages: messages that follow.
            tools: JSON schemas of the tools that the template shows.
            read: returns the text that the policy has read and sampled; None: it is rewritten in any case.

        Returns:
            The text; None: but for white space, the template keeps what was read.

        Raises:
            DataError: the template refuses the conversation.
        """
        whole = self._render([*before, *messages], add_generation_prompt=True, tools=tools)
        if read is None:
            return whole
        alone = self._render(before, add_generation_prompt=False, tools=tools)
        if whole.startswith(alone):
            return None
        gone, was_read = _left_out(alone, whole), without_space(read())
        if gone is None:
            return None if without_space(whole).startswith(was_read) else whole
        # the mark that opens reasoning may be the template's alone
        return whole if re.sub(r"^<[^<>]*>", "", without_space(gone)) in was_read else None

    @cached_property
    def shows_reasoning_field(self) -> bool:
        """Whether the template shows the reasoning that a turn has in a field of its own."""
        turn = {"role": "assistant", "content": MARK, "reasoning_content": SEEN}
        return SEEN in self._render([QUESTION, turn], add_generation_prompt=False)

    def rewrites(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return how the template rewrites a turn when messages of these roles follow; "": it does not."""
        roles = ", ".join(str(message.get("role")) for message in messages)
        if self._text(messages, tools) is None:
            return f"the chat template shows a turn of the policy differently when messages of the roles {roles} follow"
        for turn, following in _turns(messages):
            for reasoning in ({"content": f"<think>\n{SEEN}\n</think>\n\n{MARK}"}, {"reasoning_content": SEEN}):
                try:
                    alone = self._render([QUESTION, {**turn, **reasoning}], add_generation_prompt=False, tools=tools)
                    whole = self._render(
                        [QUESTION, {**turn, **reasoning}, *following], add_generation_prompt=True, tools=tools
                    )
                except DataError:
                    continue
                if SEEN in alone and SEEN not in whole:
                    followed = f"when messages of the roles {roles} follow"
                    return f"the chat template leaves out the reasoning of a turn {followed}"
        return ""

    def _check_shown(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Check once for the roles of some messages that the template shows each message behind the turn."""
        roles = tuple(str(message.get("role")) for message in messages)
        if roles in self._shown:
            return
        marked = [{**message, "content": f"{SEEN}{number}."} for number, message in enumerate(messages)]
        text = self._text(marked, tools)
        if text is None:
            text = self._render([QUESTION, next(_turns(marked))[0], *marked], add_generation_prompt=True, tools=tools)
        missing = [role for number, role in enumerate(roles) if f"{SEEN}{number}." not in text]
        if missing:
            raise ConfigError(
                f"messages of the roles {', '.join(roles)} after a turn of the policy: the chat template does not show "
                f"those of the role {missing[0]} there; give them as messages of the user, or set model.chat_template "
                "to a file with a template that shows them"
            )
        self._shown.add(roles)

    def _text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the text from the end of the policy's words on; None: the template rewrites the turn."""
        refusal: DataError | None = None
        for turn, following in _turns(messages):
            try:
                end = self._after([QUESTION, {"role": "assistant", "content": MARK}], tools)
                alone = self._after([QUESTION, turn], tools)
                whole = self._after([QUESTION, turn, *following], tools, add_generation_prompt=True)
            except DataError as error:
                refusal = error
                continue
            if None not in (end, alone, whole) and whole.startswith(alone) and alone.endswith(end):
                return end + whole[len(alone) :]
        roles = ", ".join(str(message.get("role")) for message in messages)
        if refusal is not None:
            no_tools = ". If the template has no role 'tool', give results as messages of the user"
            raise ConfigError(
                f"messages of the roles {roles} after a turn of the policy: {refusal}"
                f"{no_tools if any(message.get('role') == 'tool' for message in messages) else ''}"
            ) from refusal
        return None

    def _after(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
    ) -> Any:
        """Return the text after the marker; None where the template does not show it once."""
        text = self._render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        _, mark, after = text.partition(MARK)
        return after if mark and MARK not in after else None


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of entries with which two sequences begin alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _left_out(alone: str, whole: str) -> str | None:
    """Return the one piece of a text without which another begins as it does; None: they differ by more."""
    first = common_length(alone, whole)
    rest = whole[first:]
    for stop in range(first, len(alone)):
        if rest.startswith(alone[stop : stop + 16]) and rest.startswith(alone[stop:]):  # a few letters tell most apart
            while first and alone[first - 1] == alone[stop - 1]:  # the same piece of repeated letters, further left
                first, stop = first - 1, stop - 1
            return alone[first:stop]
    return None


def _turns(messages: Sequence[Message]) -> Iterator[tuple[Message, list[Message]]]:
    """Yield turns that the messages may follow, with these: tools reply to calls, which templates show in many ways."""
    named = [
        {"name": "tool", "tool_call_id": f"call{number:05}", **message} if message.get("role") == "tool" else message
        for number, message in enumerate(messages)
    ]
    replies = [message for message in named if message.get("role") == "tool"]
    if replies:
        for content, arguments in ((MARK, {}), ("", {"value": MARK})):
            calls = [
                {"type": "function", "id": reply["tool_call_id"], "function": {"name": reply["name"], "arguments": {}}}
                for reply in replies
            ]
            calls[-1]["function"] = {"name": replies[-1]["name"], "arguments": arguments}
            yield {"role": "assistant", "content": content, "tool_calls": calls}, [*named]
    yield {"role": "assistant", "content": MARK}, [*messages]
