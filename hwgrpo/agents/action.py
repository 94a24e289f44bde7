"""The values between the policy and its environment.

A turn of the policy becomes an `Action`; the environment answers with a `StepResult`. Tools are an environment, whose
steps are the results of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, Any]
"""A chat message, `{"role": ..., "content": ...}`."""


def nothing() -> None:
    """Do nothing: for a caller that does not ask when its call begins."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    arguments: Mapping[str, Any]
    """Parameter -> value, as JSON has it."""


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the policy, without its markup."""

    content: str
    """The text beside calls and reasoning."""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    """What is wrong with each call that cannot be read, as text for the model."""
    reasoning: str = ""
    """The text of the reasoning, as between `<think>` and `</think>`."""


class CallFormat(Protocol):
    """How a family of models writes calls: a function of a turn's text."""

    def __call__(self, text: str) -> ParsedTurn:
        """Return the parts of a turn; never raise.

        Args:
            text: all tokens of the turn but the one that ends it, decoded with special tokens.
        """
        ...


@dataclass(frozen=True)
class Action:
    """A turn of the policy, as an environment gets it."""

    text: str
    """The decoded turn, without the end of the turn."""
    token_ids: tuple[int, ...]
    """The tokens that were sampled."""
    finished: bool
    """Whether the policy ended its turn; False: no tokens were left."""
    turn: int
    """Number of the turn in its trajectory, from 0."""
    parsed: ParsedTurn
    last: bool = False
    """Whether the trajectory ends with it, by `rollout.agent.max_turns`: the policy reads no answer to it."""

    @property
    def content(self) -> str:
        """The text beside calls and reasoning."""
        return self.parsed.content

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls."""
        return self.parsed.calls

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a chat message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.parsed.reasoning:
            message["reasoning_content"] = self.parsed.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in self.calls
            ]
        return message


@dataclass(frozen=True)
class ToolResult:
    """What a call returned."""

    text: str
    """The result as the model reads it; of a failed call what went wrong."""
    failure: str = ""
    """Kind of the failure: `error`, `timeout`, `died`, `unknown` or `malformed`; "": the call succeeded."""
    seconds: float = 0.0
    """How long it took."""
    reward: float = 0.0
    """Reward of the call, from tools that give one."""
    blocks: Sequence[Any] = ()
    """Images, and blocks of text and images, that follow the text: as in an observation."""

    @property
    def content(self) -> str | list[Any]:
        """The content of the message that shows the result: text, or blocks where it has images."""
        if not self.blocks:
            return self.text
        return [*([{"type": "text", "text": self.text}] if self.text else []), *self.blocks]


class Tool(Protocol):
    """A function that the policy may call."""

    @property
    def name(self) -> str:
        """The name by which the policy calls it."""
        ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """Its JSON schema, `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""
        ...

    async def call(self, arguments: Mapping[str, Any], begun: Callable[[], None] = nothing) -> ToolResult:
        """Return the result for arguments of the policy's; failures are results, too.

        Args:
            arguments: of the call.
            begun: called in any thread when the call is made, after it has waited for a free worker; a call that is
                made once more calls it again.
        """
        ...

    def close(self) -> None:
        """Free its resources; nothing is called afterwards."""
        ...


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to an action.

    Example:
        >>> StepResult("The number is larger.", reward=0.0, done=False).messages
        [{'role': 'user', 'content': 'The number is larger.'}]
    """

    observation: str | Sequence[Message]
    """Text of a user's message, or messages; ignored when `done`."""
    reward: float = 0.0
    """Reward of the turn; those of all turns are summed."""
    done: bool = False
    """Whether the episode is over."""
    results: tuple[tuple[str, ToolResult], ...] = ()
    """Name and result of each tool call, for metrics."""
    queued: float = 0.0
    """Seconds that calls waited for a free worker, which count in no time limit."""

    @property
    def messages(self) -> list[Message]:
        """The observation as chat messages."""
        if isinstance(self.observation, str):
            return [{"role": "user", "content": self.observation}]
        return list(self.observation)
