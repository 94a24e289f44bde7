"""Rows with responses -> token ids, and which of them are trained: the responses, each with its end token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hwgrpo.data.chat_template import apply_template
from hwgrpo.data.prompt_findings import template_findings, without_space
from hwgrpo.data.row_schema import Message, message_text
from hwgrpo.errors import DataError, quoted

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold the reasoning before its content."""


@dataclass
class Targets:
    """Tokens of one row, grown segment by segment.

    A segment is tokenized together with the text before it where that leaves the earlier tokens as they are, else
    alone: either way the tokens before a response are those of the prompt in a rollout.
    """

    tokenizer: Any
    special_tokens: bool
    """Whether the tokenizer adds its own, as to plain text."""
    text: str = ""
    ids: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    findings: tuple[str, ...] = ()
    """Kinds of `prompt_findings` that the conversation is of."""

    def add(self, segment: str, ends: Sequence[int] = (), *, trained: bool) -> None:
        """Append a segment; of a trained one the tokens after its last end token are not trained."""
        joint = self._encode(self.text + segment, self.special_tokens)
        new = joint[len(self.ids) :]
        if joint[: len(self.ids)] != self.ids:
            new = self._encode(segment, False)
        self.text += segment
        at = [number for number, token in enumerate(new) if token in ends]
        last = at[-1] + 1 if at else len(new)
        self.ids += new
        self.trained += [trained and number < last for number in range(len(new))]

    def close(self, ends: Sequence[int], end: int | None) -> None:
        """Remove the tokens after the last trained one, and append the end token `end` if that is none of `ends`."""
        while self.trained and not self.trained[-1]:
            self.trained.pop()
            self.ids.pop()
        if end is not None and self.ids and self.ids[-1] not in ends:
            self.ids.append(end)
            self.trained.append(True)

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=special_tokens, return_attention_mask=False)["input_ids"]


def text_targets(prompt: str, response: str, tokenizer: Any, end: int, *, templated: bool) -> Targets:
    """Return the tokens of a prompt and of its response, which ends with the token `end`.

    Args:
        prompt: the model's input text.
        response: the response's text, without an end token.
        tokenizer: a transformers tokenizer.
        end: id of the end token.
        templated: whether the prompt has its own special tokens.
    """
    targets = Targets(tokenizer, special_tokens=not templated)
    targets.add(prompt, trained=False)
    targets.add(response, trained=True)
    targets.ids.append(end)
    targets.trained.append(True)
    return targets


def token_targets(
    prompt: str,
    response: str,
    tokens: Sequence[int],
    sampled: Sequence[Sequence[int]],
    tokenizer: Any,
    *,
    templated: bool,
) -> Targets:
    """Return the tokens of a prompt and of a trajectory as they are, of which the sampled ones are trained.

    Args:
        prompt: the model's input text.
        response: the trajectory's text.
        tokens: its tokens.
        sampled: start and stop of each run of sampled tokens; at least one.
        tokenizer: a transformers tokenizer.
        templated: whether the prompt has its own special tokens.
    """
    targets = Targets(tokenizer, special_tokens=not templated)
    targets.add(prompt, trained=False)
    trained = [False] * len(tokens)
    for start, stop in sampled:
        trained[start:stop] = [True] * (stop - start)
    targets.text += response
    targets.ids += tokens
    targets.trained += trained
    targets.close((), None)
    return targets


def chat_targets(
    messages: Sequence[Message],
    first: int,
    config: Any,
    tokenizer: Any,
    ends: Sequence[int],
    place: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Targets:
    """Return the tokens of a conversation, of which the assistant's messages are trained.

    The conversation is rendered up to each of these messages, and up to its end: what the template appends for the
    message is trained up to the end token. So a message has the context that it has in a rollout.

    Args:
        messages: the conversation.
        first: index of the first message that may be trained.
        config: the `data` settings.
        tokenizer: a transformers tokenizer with a chat template.
        ends: ids of the tokens that end a response.
        place: file and line, for messages.
        tools: JSON schemas of the tools that the template shows.

    Raises:
        DataError: no message is the assistant's, or the template writes a conversation's beginning another way when
            it goes on, or leaves out a part of a message that would be trained.
    """
    targets = Targets(tokenizer, special_tokens=False)
    apply = partial(apply_template, config=config, tokenizer=tokenizer, place=place, tools=tools)
    for number in range(first, len(messages)):
        if messages[number]["role"] != "assistant":
            continue
        if number == 0:
            raise DataError(f"{place}: the conversation begins with the assistant's message; it needs one before it")
        before = apply(messages[:number], add_generation_prompt=True)
        after = apply(messages[: number + 1], add_generation_prompt=False)
        if not before.startswith(targets.text) or not after.startswith(before):
            raise DataError(
                f"{place}: the chat template does not keep what it wrote before message {number} (of the assistant): "
                "it leaves out earlier reasoning, or begins messages otherwise when they are generated, so that the "
                "tokens of the turns do not add up. Use one row per turn with the earlier messages in the prompt, "
                "or model.chat_template with a template that keeps them"
            )
        closed = apply(messages[:number], add_generation_prompt=False)
        written = after[len(closed) :] if after.startswith(closed) else after[len(before) :]
        _check_written(messages[number], written, f"{place}: message {number} (of the assistant)")
        targets.add(before[len(targets.text) :], trained=False)
        targets.add(after[len(before) :], ends, trained=True)
    if not any(targets.trained):
        raise DataError(f"{place}: no message of the conversation is the assistant's, so there is nothing to train")
    targets.close(ends, tokenizer.eos_token_id)
    targets.findings = tuple(template_findings(messages, targets.text, tokenizer))
    return targets


def _check_written(message: Message, written: str, name: str) -> None:
    """Check that a chat template has written all of a message, but for white space.

    Raises:
        DataError: a part is left out, and would not be trained.
    """
    text = without_space(written)
    parts = {key: value for key in REASONING if isinstance(value := message.get(key), str)}
    parts |= {f"call {n}": call["function"]["name"] for n, call in enumerate(message.get("tool_calls") or ())}
    for key, value in {"content": message_text(message), **parts}.items():
        if without_space(value) not in text:
            raise DataError(
                f"{name}: the chat template leaves out a part of its {key}, {quoted(value, 60)}, which would not be "
                "trained: write the reasoning into content in the form that the template keeps, or set "
                "model.chat_template to a file with a template that writes all of it"
            )
