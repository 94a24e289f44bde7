"""The answers of tools to a turn that calls them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from hwgrpo.agents.action import Action, StepResult, Tool, ToolCall, ToolResult
from hwgrpo.agents.result_blocks import Block, as_blocks, as_content, text_block
from hwgrpo.agents.tools import close_tools
from hwgrpo.data.image_rows import BLOCK
from hwgrpo.errors import ConfigError
from hwgrpo.rollout.turn_template import TurnTemplate

OBSERVATION = [{"role": "user", "content": "observation"}]
"""What the policy reads next, where no tool answers it."""
IMAGE = {"content": [dict(BLOCK)]}
"""Content of a message with an image."""


def check_observations(turns: TurnTemplate) -> None:
    """Check that messages of the user may follow a turn of the policy.

    Raises:
        ConfigError: the chat template refuses them.
    """
    try:
        turns.between([0], False, OBSERVATION)
    except ConfigError as error:
        raise ConfigError(
            f"rollout.workflow: what the policy reads next is a message of the user, and {error}"
        ) from error


class Tools:
    """The tools of `rollout.agent.tools`.

    Args:
        tools: with different names.
        turns: the chat template between turns, which may have no role for results.
        tokenizer: its special tokens are left out of results, where they could end a message.

    Raises:
        ConfigError: the template shows results neither in a role of their own nor as messages of the user.
    """

    def __init__(self, tools: Sequence[Tool], turns: TurnTemplate, tokenizer: Any) -> None:
        self._tools = {tool.name: tool for tool in tools}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*tokenizer.all_special_tokens, *(str(token) for token in added.values() if token.special)} - {""}
        longest_first = sorted(special, key=lambda token: (-len(token), token))
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._role, self.notes = "tool", ()
        self.probe: list[dict[str, Any]] = []
        """Messages as those of a call's results; [] without tools."""
        if tools:
            result = {"role": "tool", "name": tools[0].name, "content": "result"}
            missing = ""
            if not all(map(turns.shows, ([result], [result, result]))):  # of one call, and of several
                missing = "the chat template has no role for them"
            elif turns.shows([{**OBSERVATION[0], **IMAGE}]) and not turns.shows([{**result, **IMAGE}]):
                missing = "the role of the chat template for them shows no images"
            if missing:
                check_observations(turns)
                self._role = "user"
                self.notes = (f"tool results are messages of the user: {missing}",)
            self.probe = OBSERVATION if missing else [result]

    def answer(self, action: Action, others: Collection[str]) -> bool:
        """Return whether these tools answer a turn.

        Args:
            action: the turn.
            others: names of tools of the environment, which answers turns that call only these.
        """
        called = {call.name for call in action.calls}
        return bool(self._tools) and bool(called or action.parsed.malformed) and not (called and called <= {*others})

    async def step(self, action: Action, seconds: float, others: Collection[str] = ()) -> StepResult:
        """Return the results of a turn's calls, which run at the same time, in the order of the calls.

        Args:
            action: the turn.
            seconds: time limit of each call from when a worker makes it; a later one is a result that says so.
            others: names of tools of the environment, which are not called together with these.
        """
        began = time.monotonic()
        results = await asyncio.gather(*(self._result(call, seconds, others) for call in action.calls))
        queued = time.monotonic() - began - max((result.seconds for result in results), default=0.0)
        named = [(call.name, result) for call, result in zip(action.calls, results, strict=True)]
        named += [("", ToolResult(text, "malformed")) for text in action.parsed.malformed]
        return StepResult(
            self._messages(named),
            reward=sum(result.reward for _, result in named),
            results=tuple(named),
            queued=max(0.0, queued),
        )

    def close(self) -> None:
        """End the tools' processes."""
        close_tools([*self._tools.values()])

    async def _result(self, call: ToolCall, seconds: float, others: Collection[str]) -> ToolResult:
        tool = self._tools.get(call.name)
        if tool is None and call.name in others:
            return ToolResult(f"Error: call {call.name} in a turn without calls of {', '.join(self._tools)}", "error")
        if tool is None:
            known = ", ".join(self._tools)
            return ToolResult(f"Error: there is no tool {call.name!r}; the tools are: {known}", "unknown")
        try:
            async with asyncio.timeout(None if seconds else 0.0) as limit:
                return await tool.call(call.arguments, _starts(limit, seconds))
        except TimeoutError:
            return ToolResult(f"Error: {call.name} took longer than {seconds:.3g} s", "timeout", seconds)

    def _messages(self, named: Sequence[tuple[str, ToolResult]]) -> list[dict[str, Any]]:
        """Return the results as messages; of the user as one: many templates refuse two of the same role."""
        contents = [(name, self._content(result)) for name, result in named]
        if self._role == "user":
            lines = [block for _, content in contents for block in (text_block("\n"), *as_blocks(content))]
            return [{"role": "user", "content": as_content(lines[1:])}]
        return [{"role": "tool", "content": content} | ({"name": name} if name else {}) for name, content in contents]

    def _content(self, result: ToolResult) -> str | list[Block]:
        """Return the content of a result without special tokens in its texts."""
        blocks = as_blocks(result.content)
        texts = iter(self._without_special_tokens([block["text"] for block in blocks if block["type"] == "text"]))
        return as_content([text_block(next(texts)) if block["type"] == "text" else block for block in blocks])

    def _without_special_tokens(self, texts: Sequence[str]) -> list[str]:
        """Return the texts without special tokens.

        Cut out are also those that others leave when they are cut out, and those of texts with an image between them,
        which a template may show one after the other.
        """
        shorter = [self._cut(text) for text in texts]
        while found := self._special.search("".join(shorter)):
            place = 0
            for number, text in enumerate(shorter):
                start, stop = max(0, found.start() - place), max(0, found.end() - place)
                shorter[number], place = text[:start] + text[stop:], place + len(text)
        return shorter

    def _cut(self, text: str) -> str:
        while (shorter := self._special.sub("", text)) != text:
            text = shorter
        return text


def _starts(limit: asyncio.Timeout, seconds: float) -> Callable[[], None]:
    """Return a function that starts a time limit, from any thread, unless it is over."""
    loop = asyncio.get_running_loop()

    def start() -> None:
        with suppress(RuntimeError):  # the call has ended
            limit.reschedule(loop.time() + seconds)

    def begun() -> None:
        with suppress(RuntimeError):  # nobody waits for the call any more: the loop is closed
            loop.call_soon_threadsafe(start)

    return begun
