"""Workflows: how the responses to one prompt come about, in turns of sampled and observed tokens (`rollout.workflow`).

A workflow runs once per prompt and asks a `Sampler` for tokens. The workflows of a batch run at the same time
(`WorkflowEngine`).
Tokens go in and out as they are: a trajectory is never decoded and tokenized again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch

from hwgrpo.data.observed_images import shows_images, without_images
from hwgrpo.errors import ConfigError, DataError, RunError
from hwgrpo.rollout.turn_template import HistoryRefused, TurnTemplate, common_length
from hwgrpo.values import NO_ROW, Completions, Prompt, PromptImages, Sampling, text_axes

T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a response from one origin."""

    role: Literal["sampled", "observed"]
    """`sampled` by the policy, or `observed`, as a tool's reply: the model reads them, and they carry no loss."""
    columns: Completions
    """The tokens as one response, with all that belongs to each token."""
    images: PromptImages | None = None
    """Images that were observed; their `axes` are counted from the segment's first token."""
    row: int | None = None
    """Of the first segment of a further row: how many tokens of the prompt the row begins with; None: it goes on."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens."""
        return self.columns.tokens.tolist()

    @property
    def text(self) -> str:
        """The decoded tokens, without a stop string."""
        return self.columns.texts[0]

    @property
    def finished(self) -> bool:
        """Whether the policy ended it with a stop token or string, not the limit of tokens."""
        return bool(self.columns.finished[0])


@dataclass
class Trajectory:
    """A prompt and the response to it so far.

    What the model reads is one row: the prompt, and all that was sampled and observed. A history that is rewritten
    begins a further row (`fork`); rows are trained together, as one response.

    Args:
        prompt: the prompt.
        left: tokens that the row may still have.
    """

    prompt: Prompt
    left: int
    segments: list[Segment] = field(default_factory=list)
    outcome: dict[str, Any] = field(default_factory=dict)
    """What else there is to know of it, as JSON has it: `Completions.outcomes`."""
    finished: bool | None = None
    """Whether it ended by itself; None: as its last sampled segment, unless it is truncated."""
    truncated: bool = False
    """No tokens were left for what was sampled or observed: the workflow ends it here."""
    messages: list[Mapping[str, Any]] | None = field(default_factory=list)
    """What followed the prompt, as chat messages; None: not known, so that no history can be rewritten."""
    forked: bool = False
    """Whether nothing has been sampled in the last row."""

    def __post_init__(self) -> None:
        self._room = self.left

    @property
    def token_ids(self) -> list[int]:
        """The prompt's tokens and all of the last row: what the model reads next."""
        first = max((i for i, segment in enumerate(self.segments) if segment.row is not None), default=0)
        kept = self.segments[first].row if self.segments else None
        row = (token for segment in self.segments[first:] for token in segment.token_ids)
        return [*self.prompt.token_ids[:kept], *row]

    @property
    def images(self) -> PromptImages | None:
        """All that the model sees besides the tokens."""
        parts = [
            part
            for images in (self.prompt.images, *(segment.images for segment in self.segments))
            if images is not None
            for part in images.parts
        ]
        if all(segment.images is None for segment in self.segments):
            return self.prompt.images
        shifts = self._shifts()
        if shifts is None:
            return _together(parts, None)
        own = text_axes(len(self.prompt.token_ids)) if self.prompt.images is None else self.prompt.images.axes
        assert own is not None
        return _together(parts, torch.cat([own, shifts + text_axes(len(shifts)) + int(own.max()) + 1]))

    def _shifts(self) -> torch.Tensor | None:
        """Return `Completions.shifts` of the response; None where no image with positions was observed."""
        if all(segment.images is None or segment.images.axes is None for segment in self.segments):
            return None
        shift, each = 0, []
        for segment in self.segments:
            length = len(segment.columns.tokens)
            own = text_axes(length) if segment.images is None else segment.images.axes
            assert own is not None
            each.append(own - text_axes(length) + shift)
            shift += int(own.max()) + 1 - length if length else 0
        return torch.cat(each)

    @property
    def text(self) -> str:
        """The text of the response."""
        return "".join(segment.text for segment in self.segments)

    def observe(self, token_ids: Sequence[int], text: str, images: PromptImages | None = None) -> None:
        """Append tokens that the policy did not sample, as far as tokens are left; with images all of them or none.

        Args:
            token_ids: the tokens, with those of the chat template around them (`Sampler.encode`).
            text: their text, for records and rewards.
            images: of which some tokens stand for parts; their `axes` are counted from the first of these tokens.
        """
        self.messages = None
        self.append_observed(token_ids, text, images)

    def fork(self, token_ids: Sequence[int], text: str, prompt_tokens: int | None = None) -> None:
        """Begin a further row: what the model reads next is the prompt and another history. A long one truncates.

        Args:
            token_ids: the tokens of the history, which carry no loss.
            text: text of what is new in it, for records and rewards.
            prompt_tokens: how many tokens of the prompt come before it; None: all.

        Raises:
            RunError: there is no such beginning of the prompt.
            ConfigError: the trajectory has images.
        """
        if self.images is not None:
            raise ConfigError(
                f"the prompt {self.prompt.uid} or what follows it has images, and a history that is rewritten begins a "
                "row of text alone; set model.chat_template to a template that only appends"
            )
        most = len(self.prompt.token_ids)
        row = most if prompt_tokens is None else prompt_tokens
        if not 1 <= row <= most:
            raise RunError(f"fork(prompt_tokens={row}): a row begins with 1 to {most} tokens of the prompt")
        if len(token_ids) > self._room:
            self.truncated = True
            return
        self.left, self.forked = self._room, True
        self.append(Segment("observed", not_sampled(token_ids, text), row=row))

    def append_observed(self, token_ids: Sequence[int], text: str, images: PromptImages | None = None) -> None:
        """Append observed tokens, as far as tokens are left; `messages` has them already."""
        self.truncated = self.truncated or len(token_ids) > self.left
        if images is not None:
            if not self.truncated:
                self.append(Segment("observed", not_sampled(token_ids, text), images))
            return
        self.append(Segment("observed", not_sampled([*token_ids][: self.left], text)))

    def append(self, segment: Segment) -> None:
        """Append a segment of this trajectory."""
        self.segments.append(segment)
        self.left -= len(segment.columns.tokens)

    def completion(self, prompt_index: int) -> Completions:
        """Return the response as one sequence."""
        sampled = [segment.columns for segment in self.segments if segment.role == "sampled"]
        version = min(each.weight_version for each in sampled)
        ended = not self.truncated and bool(sampled[-1].finished[0])
        extras = sampled[0].token_extras
        parts = [
            segment.columns
            if segment.role == "sampled"
            else replace(
                segment.columns,
                weight_version=version,
                token_extras={
                    name: values.new_zeros(len(segment.columns.tokens), *values.shape[1:])
                    for name, values in extras.items()
                },
            )
            for segment in self.segments
        ]
        joined = Completions.concat(parts, prompts=[1] * len(parts))
        seen = tuple(segment.images for segment in self.segments if segment.images is not None)
        return replace(
            joined,
            row_starts=self._row_starts(),
            prompt_index=torch.tensor([prompt_index]),
            offsets=torch.tensor([0, len(joined.tokens)]),
            finished=torch.tensor([ended if self.finished is None else self.finished]),
            texts=(self.text,),
            outcomes=(self.outcome,),
            seen=(seen,) if seen else (),
            shifts=self._shifts(),
        )

    def _row_starts(self) -> torch.Tensor | None:
        """Return the response's `row_starts`; None: it is one row."""
        if all(segment.row is None for segment in self.segments):
            return None
        starts: list[int] = []
        row = NO_ROW
        for segment in self.segments:
            row = row if segment.row is None else segment.row
            tokens = len(segment.columns.tokens)
            starts += [row, *[NO_ROW] * (tokens - 1)] if tokens else []
            row = NO_ROW if tokens else row
        return torch.tensor(starts, dtype=torch.int64)


def _together(parts: Sequence[PromptImages], axes: torch.Tensor | None) -> PromptImages:
    """Return images one after another as those of one prompt."""
    return replace(parts[-1], earlier=tuple(parts[:-1]), axes=axes)


Workflow = Callable[[Prompt, "Sampler"], Awaitable[Sequence[Trajectory]]]


@dataclass(frozen=True)
class WorkflowParts:
    """What a workflow that is a class is made with."""

    config: Any
    """The run's settings (`Config`)."""
    tokenizer: Any
    """The model's."""
    turns: TurnTemplate | None
    """The chat template between turns; None: the tokenizer has none."""


MakeWorkflow = Callable[[WorkflowParts], Workflow]


class GroupDropped(Exception):
    """Raised in a workflow whose tokens came too late; its text is the reason."""


@dataclass
class TokenRequest:
    """What a workflow asks for in one call of `Sampler.sample` or `Sampler.responses`."""

    uid: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    done: asyncio.Future[list[Completions]]
    continues: tuple[int, int] | None
    """Number of the session's request, and index of its response, that it continues; None: unknown, or none."""
    images: PromptImages | None = None
    """What the model sees besides the tokens."""
    number: int | None = None
    """In the session; None: not submitted, or there is none."""

    @property
    def prompt(self) -> Prompt:
        """What the engine samples from."""
        return Prompt(self.uid, "", self.token_ids, None, {}, images=self.images)


@dataclass
class WorkflowRequests:
    """What the workflows of a batch have asked for and has not been sampled yet, and what is kept of their turns."""

    requests: list[TokenRequest] = field(default_factory=list)
    running: int = 0
    """Strands that neither wait for tokens, nor for strands of their own, nor have ended."""
    all_asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no strand runs, or once a workflow has failed."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by each request and each workflow that ends."""
    failed: bool = False
    """Whether a workflow has raised, at which the others are not waited for."""
    last_turns: dict[int, tuple[Trajectory, Sampler, tuple[int, int]]] = field(default_factory=dict)
    """id of each trajectory that may go on -> it, the sampler of its last turn, and that turn's number and index."""
    over: list[tuple[int, int]] = field(default_factory=list)
    """Last turns of trajectories that do not go on, since the last time that tokens were sampled."""

    def ask(self, request: TokenRequest) -> None:
        """Add a request; its strand waits until `answer`."""
        self.requests.append(request)
        self.changed(-1)
        self.news.set()

    def answer(self, request: TokenRequest, result: list[Completions] | Exception) -> None:
        """Let the strand of a request go on with its responses, or with an error."""
        if request.done.done():  # its strand has been cancelled
            return
        self.changed(1)
        if isinstance(result, Exception):
            request.done.set_exception(result)
        else:
            request.done.set_result(result)

    def unsampled(self) -> list[TokenRequest]:
        """Return the requests since the last call, without those of cancelled strands, in the order of their uids."""
        requests, self.requests = self.requests, []
        return sorted((each for each in requests if not each.done.done()), key=lambda each: each.uid)

    def changed(self, by: int) -> None:
        """Count strands that run."""
        self.running += by
        if self.running and not self.failed:
            self.all_asked.clear()
        else:
            self.all_asked.set()

    def ended(self, task: asyncio.Task[Any]) -> None:
        """Record that a workflow has ended."""
        self.failed = self.failed or (not task.cancelled() and task.exception() is not None)
        self.changed(-1)
        self.news.set()

    def take_over(self) -> list[tuple[int, int]]:
        """Return the last turns of trajectories that do not go on, since the last call."""
        over, self.over = self.over, []
        return over

    def goes_on(self, trajectory: Trajectory, sampler: Sampler, turn: tuple[int, int]) -> None:
        """Record the last turn of a trajectory, which may go on unless it is truncated."""
        if trajectory.truncated:
            self.last_turns.pop(id(trajectory), None)
            self.over.append(turn)
        else:
            self.last_turns[id(trajectory)] = (trajectory, sampler, turn)

    def last_turn(self, trajectory: Trajectory | None) -> tuple[int, int] | None:
        """Return number and index of a trajectory's last turn; None: it has none that is kept."""
        known = self.last_turns.get(id(trajectory))
        return None if known is None else known[2]

    def forget(self, which: Callable[[Trajectory, Sampler], bool]) -> None:
        """Record that some trajectories do not go on."""
        gone = {key: turn for key, (of, sampler, turn) in self.last_turns.items() if which(of, sampler)}
        for key, turn in gone.items():
            del self.last_turns[key]
            self.over.append(turn)


class Sampler:
    """Samples for the workflow of one prompt; made for each call of it.

    Args:
        prompt: the workflow's prompt.
        sampling: the run's parameters, or those of a validation.
        tokenizer: tokenizes what is observed.
        requests: those of all workflows of the batch.
        name: name of this strand of the workflow, by which its random numbers differ from those of others.
        turns: the chat template between turns; None: the tokenizer has none.
    """

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        tokenizer: Any,
        requests: WorkflowRequests,
        name: str = "",
        turns: TurnTemplate | None = None,
    ) -> None:
        self._prompt, self._sampling, self._tokenizer = prompt, sampling, tokenizer
        self._requests, self._name, self._turns = requests, name, turns
        self._asked = self._forked = 0
        self._busy = False

    @property
    def n(self) -> int:
        """Responses to the prompt that the run wants, `rollout.n`."""
        return self._sampling.n

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens around it."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def observe(
        self,
        trajectory: Trajectory,
        messages: Sequence[Mapping[str, Any]],
        *,
        turn: Mapping[str, Any] | None = None,
    ) -> None:
        """Append messages that follow a sampled segment, in the chat template, and the beginning of the next turn.

        The tokens that were sampled stay as they are: only those of the messages are added. Where the template writes
        earlier turns differently now, the model reads the conversation as it is written, in a further row.

        Args:
            trajectory: its last segment is sampled.
            messages: all messages up to the policy's next turn, such as `{"role": "tool", "content": ...}`.
            turn: the policy's turn as a chat message; None: its text is the content.

        Raises:
            RunError: the last segment is not sampled.
            ConfigError: there is no chat template, it refuses these messages, or rewrites what is no conversation.
            DataError: an image in them cannot be read, is not allowed, or the model reads text alone.
            HistoryRefused: the template writes earlier turns differently, and the history cannot begin a row.
        """
        if not trajectory.segments or trajectory.segments[-1].role != "sampled":
            raise RunError("observe() follows a sampled segment: give all messages up to the policy's turn at once")
        if self._turns is None:
            raise ConfigError(
                "observe() with messages needs the tokenizer's chat template, and it has none; set "
                "model.chat_template, or use Trajectory.observe with tokens of Sampler.encode"
            )
        last, images = trajectory.segments[-1], None
        after = last.token_ids, last.finished
        if shows_images(messages):
            tokens, images = self._turns.between_with_images(*after, messages, self._prompt.tools)
            messages = [without_images(message) for message in messages]
        else:
            tokens = self._turns.between(*after, messages, self._prompt.tools)
        history = self._history(trajectory, messages, turn, appends=tokens is not None)
        if tokens is None:
            text = "\n".join(str(message.get("content")) for message in messages)
        else:
            read = tokens[: trajectory.left] if history is None else tokens
            text = self._tokenizer.decode(read, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if history is None:
            assert tokens is not None, "refused"
            trajectory.append_observed(tokens, text, images)
            return
        if images is not None:
            raise ConfigError(
                f"the chat template writes earlier turns of the prompt {self._prompt.uid} differently when an image "
                "follows, which a further row does not show; set model.chat_template to a template that only appends"
            )
        kept = common_length(self._prompt.token_ids, history)
        if not kept:
            raise HistoryRefused(
                f"the chat template writes earlier turns differently now, and begins otherwise than the prompt "
                f"{self._prompt.uid}, which may have been truncated (data.overlong): set model.chat_template to a "
                "template that only appends"
            )
        trajectory.fork(history[kept:], text, kept)

    def _history(
        self,
        trajectory: Trajectory,
        messages: Sequence[Mapping[str, Any]],
        turn: Mapping[str, Any] | None,
        *,
        appends: bool,
    ) -> list[int] | None:
        """Return the tokens of the conversation where it is rewritten, and add the messages to the trajectory's.

        None: they are appended, as they are where the template refuses a conversation that it can go on.
        """
        turns = self._turns
        assert turns is not None
        last = [*itertools.takewhile(lambda segment: segment.role == "sampled", reversed(trajectory.segments))]
        said = "".join(segment.text for segment in reversed(last))
        before = conversation(self._prompt, trajectory.messages, turn or {"role": "assistant", "content": said})
        if before is None:
            if not appends:
                raise ConfigError(
                    f"{turns.rewrites(messages)}, and the prompt {self._prompt.uid} or what follows it is no "
                    "conversation that could be written anew; set model.chat_template to a template that only "
                    "appends, or use Trajectory.observe or Trajectory.fork with tokens of your own"
                )
            return None
        assert trajectory.messages is not None
        trajectory.messages += [before[-1], *messages]

        def read() -> str:
            tokens = trajectory.token_ids
            if turns.has_end(last[0].token_ids, last[0].finished):
                tokens.pop()
            return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

        try:
            text = turns.rewritten(before, messages, self._prompt.tools, read if appends else None)
        except DataError as error:
            if appends:
                return None
            raise HistoryRefused(f"{turns.rewrites(messages)}: {error}") from error
        return None if text is None else self._tokenizer.encode(text, add_special_tokens=False)

    def trajectory(self) -> Trajectory:
        """Return a response to the prompt that has no tokens yet."""
        return Trajectory(self._prompt, self._sampling.max_response_tokens)

    async def sample(
        self, trajectory: Trajectory, *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Segment:
        """Sample the next tokens of a trajectory and append them to it.

        Args:
            trajectory: of this sampler's prompt.
            max_tokens: most tokens; None: as many as the trajectory may still have.
            stop: further strings that end the segment, beside `rollout.stop`.

        Returns:
            The segment. Without tokens left it is empty, and the trajectory is `truncated`.

        Raises:
            RunError: the trajectory was truncated before, `max_tokens` is below 1, or another call of this sampler is
                not over: use `gather`.
        """
        if trajectory.truncated:
            raise RunError("sample() was called for a truncated trajectory: a workflow ends it there")
        if max_tokens is not None and max_tokens < 1:
            raise RunError(f"sample(max_tokens={max_tokens}): a segment has at least one token")
        most = trajectory.left if max_tokens is None else min(trajectory.left, max_tokens)
        if trajectory.forked:  # its keys and values are of another row
            self._requests.forget(lambda each, _: each is trajectory)
            trajectory.forked = False
        if not most:
            trajectory.truncated = True
            self._requests.forget(lambda each, _: each is trajectory)
            return Segment("sampled", not_sampled((), ""))
        continues = self._requests.last_turn(trajectory)
        tokens, images = trajectory.token_ids, trajectory.images
        (columns,), number = await self._columns(tokens, images, 1, most, stop, continues)
        segment = Segment("sampled", columns)
        trajectory.append(segment)
        trajectory.truncated = not trajectory.left and not segment.finished
        if number is not None:
            self._requests.goes_on(trajectory, self, (number, 0))
        return segment

    async def responses(self) -> list[Trajectory]:
        """Sample `n` single-turn responses; the prompt is computed once."""
        trajectories = [self.trajectory() for _ in range(self.n)]
        tokens, images = self._prompt.token_ids, self._prompt.images
        columns, number = await self._columns(tokens, images, self.n, trajectories[0].left, ())
        for i, (trajectory, each) in enumerate(zip(trajectories, columns, strict=True)):
            trajectory.append(Segment("sampled", each))
            trajectory.truncated = not bool(each.finished[0])
            if number is not None:
                self._requests.goes_on(trajectory, self, (number, i))
        return trajectories

    async def gather(self, run: Callable[[Sampler], Coroutine[Any, Any, T]], count: int | None = None) -> list[T]:
        """Run a coroutine several times at once, each with a sampler of its own; return the results in order.

        Args:
            run: makes the coroutine.
            count: how often; None: `n`.
        """
        samplers = []
        for _ in range(self.n if count is None else count):
            name = f"{self._name}/{self._forked}"
            samplers.append(Sampler(self._prompt, self._sampling, self._tokenizer, self._requests, name, self._turns))
            self._forked += 1

        going_on = len(samplers)

        async def strand(sampler: Sampler) -> T:
            nonlocal going_on
            try:
                return await run(sampler)
            finally:
                self._requests.forget(lambda _, of: of is sampler)
                going_on -= 1
                if going_on:
                    self._requests.changed(-1)  # this strand runs in place of the last one, without a moment between

        if not samplers:
            return []
        self._requests.changed(len(samplers) - 1)  # this strand waits for them
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(strand(sampler)) for sampler in samplers]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _columns(
        self,
        token_ids: Sequence[int],
        images: PromptImages | None,
        n: int,
        most: int,
        stop: Sequence[str],
        continues: tuple[int, int] | None = None,
    ) -> tuple[list[Completions], int | None]:
        """Return n responses, and the session's number of the request."""
        if self._busy:
            raise RunError(
                "sample() was called while another call of the same sampler waits: use Sampler.gather, which gives "
                "each coroutine a sampler of its own"
            )
        first = not self._name and not self._asked
        uid = self._prompt.uid if first else f"{self._prompt.uid}{self._name}.{self._asked}"
        self._asked += 1
        stops = (*self._sampling.stop, *stop)
        sampling = replace(self._sampling, n=n, max_response_tokens=most, stop=stops)
        done: asyncio.Future[list[Completions]] = asyncio.get_running_loop().create_future()
        request = TokenRequest(uid, tuple(token_ids), sampling, done, continues, images)
        self._busy = True
        self._requests.ask(request)
        try:
            return await done, request.number
        except asyncio.CancelledError:
            if done.cancelled():  # otherwise `answer` has counted this strand
                self._requests.changed(1)
            raise
        finally:
            self._busy = False


def conversation(
    prompt: Prompt, messages: Sequence[Mapping[str, Any]] | None, turn: Mapping[str, Any]
) -> list[Mapping[str, Any]] | None:
    """Return prompt, earlier messages and the policy's last turn as one conversation; None: they are none.

    A prompt may end with the beginning of the policy's first turn.
    """
    if prompt.messages is None or messages is None:
        return None
    begun = prompt.messages[-1]
    if begun["role"] != "assistant" or not begun["content"]:
        whole = [*(prompt.messages[:-1] if begun["role"] == "assistant" else prompt.messages), *messages, turn]
    else:
        first, *rest = [*messages, turn]
        beginning, content = begun["content"], first.get("content")
        if not isinstance(beginning, str) or not isinstance(content, str):
            return None
        whole = [*prompt.messages[:-1], {**first, "content": beginning + content}, *rest]
    return whole


async def single_turn(prompt: Prompt, sampler: Sampler) -> Sequence[Trajectory]:
    """Return `n` responses to the prompt: the default."""
    return await sampler.responses()


def not_sampled(token_ids: Sequence[int], text: str) -> Completions:
    """Return one response of tokens that carry no loss."""
    tokens = torch.tensor([*token_ids], dtype=torch.int64)
    return Completions(
        prompt_index=torch.zeros(1, dtype=torch.int64),
        tokens=tokens,
        offsets=torch.tensor([0, len(tokens)]),
        logprobs=torch.zeros(len(tokens)),
        loss_mask=torch.zeros(len(tokens), dtype=torch.bool),
        finished=torch.zeros(1, dtype=torch.bool),
        texts=(text,),
    )
