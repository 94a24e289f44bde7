"""The tokens between two turns of the policy, by the model's chat template: what was sampled is never tokenized again.

The template renders a turn with a marker in place of the policy's words, alone and followed by the new messages. What
stands behind the marker is the end of the turn, the messages, and the beginning of the next turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from hwgrpo.errors import ConfigError, DataError

Message = Mapping[str, Any]
MARK = "qz7mark"
"""Words of the policy; no template has them."""
SEEN = "qz8seen"
"""Content of a message that is looked for."""
QUESTION: Message = {"role": "user", "content": "question"}


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
    """

    def __init__(self, render: Render, tokenizer: Any, end_ids: Collection[int]) -> None:
        self._render, self._tokenizer, self._end_ids = render, tokenizer, end_ids
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
    ) -> list[int]:
        """Return the tokens from the end of a sampled turn to the beginning of the next one.

        Args:
            sampled: tokens of the turn.
            finished: whether a stop token or string ended it. A special token is the template's end of the turn, or
                stands for it; one with text (of `rollout.stop_token_ids`, such as `</tool_call>`) comes before it, as a
                stop string.
            messages: messages that follow, such as a tool's or the user's.
            tools: JSON schemas of the tools that the template shows.

        Raises:
            ConfigError: the template refuses these messages, leaves one of them out, or shows a turn differently when
                they follow.
        """
        self._check_shown(messages, tools)
        tokens = self._tokenizer.encode(self._text(messages, tools), add_special_tokens=False)
        if not tokens or not finished or not sampled or sampled[-1] not in self._end_ids:
            return tokens
        stands_for_it = self.has_end(sampled, finished) and tokens[0] in self._special
        return tokens[1:] if stands_for_it or tokens[0] == sampled[-1] else tokens

    def has_end(self, sampled: Sequence[int], finished: bool) -> bool:
        """Return whether the last token of a sampled turn is a special token that ended it, not one with text."""
        return finished and len(sampled) > 0 and sampled[-1] in self._end_ids and sampled[-1] in self._special

    def _check_shown(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Check once for the roles of some messages that the template shows each message behind the turn."""
        roles = tuple(str(message.get("role")) for message in messages)
        if roles in self._shown:
            return
        marked = [{**message, "content": f"{SEEN}{number}."} for number, message in enumerate(messages)]
        text = self._text(marked, tools)
        missing = [role for number, role in enumerate(roles) if f"{SEEN}{number}." not in text]
        if missing:
            raise ConfigError(
                f"messages of the roles {', '.join(roles)} after a turn of the policy: the chat template does not show "
                f"those of the role {missing[0]} there; give them as messages of the user, or set model.chat_template "
                "to a file with a template that shows them"
            )
        self._shown.add(roles)

    def _text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the text from the end of the policy's words on."""
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
        raise ConfigError(
            f"the chat template shows a turn of the policy differently when messages of the roles {roles} follow it: "
            "the tokens between turns are not known; set model.chat_template to a template that only appends, or use "
            "Trajectory.observe with tokens of your own"
        )

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
