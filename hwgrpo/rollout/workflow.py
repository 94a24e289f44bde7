"""Workflows: how the responses to one prompt come about, in turns of sampled and observed tokens (`rollout.workflow`).

A workflow runs once per prompt and asks a `Sampler` for tokens. The workflows of a batch run at the same time, in
rounds: when every one waits for tokens, all that were asked for are sampled: at once by an engine with `generate_each`,
else those with the same parameters and limit of tokens in one batch. What shares a batch depends on the workflows
alone, not on how fast one is; so do the numbers.
Tokens go in and out as they are: a trajectory is never decoded and tokenized again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch

from hwgrpo.catalog import WORKFLOWS
from hwgrpo.errors import ConfigError, RunError, shown
from hwgrpo.rollout.engine import Engine
from hwgrpo.rollout.turn_template import TurnTemplate
from hwgrpo.user_code import describe_error
from hwgrpo.values import Completions, Prompt, PromptBatch, Sampling

T = TypeVar("T")
DEFAULT = "single_turn"


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a response from one origin."""

    role: Literal["sampled", "observed"]
    """`sampled` by the policy, or `observed`, as a tool's reply: the model reads them, and they carry no loss."""
    columns: Completions
    """The tokens as one response, with all that belongs to each token."""

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

    Args:
        prompt: the prompt.
        left: tokens that the response may still have.
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

    @property
    def token_ids(self) -> list[int]:
        """The prompt's tokens and all of the response: what the model reads next."""
        return [*self.prompt.token_ids, *(token for segment in self.segments for token in segment.token_ids)]

    @property
    def text(self) -> str:
        """The text of the response."""
        return "".join(segment.text for segment in self.segments)

    def observe(self, token_ids: Sequence[int], text: str) -> None:
        """Append tokens that the policy did not sample, as far as tokens are left.

        Args:
            token_ids: the tokens, with those of the chat template around them (`Sampler.encode`).
            text: their text, for records and rewards.
        """
        self.truncated = self.truncated or len(token_ids) > self.left
        self.append(Segment("observed", _not_sampled([*token_ids][: self.left], text)))

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
        return replace(
            joined,
            prompt_index=torch.tensor([prompt_index]),
            offsets=torch.tensor([0, len(joined.tokens)]),
            finished=torch.tensor([ended if self.finished is None else self.finished]),
            texts=(self.text,),
            outcomes=(self.outcome,),
        )


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


class GroupDropped(Exception):
    """Raised in a workflow whose tokens came too late; its text is the reason."""


@dataclass
class _Request:
    uid: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    done: asyncio.Future[list[Completions]]


@dataclass
class _Round:
    """What all workflows of a batch have asked for since the last round."""

    requests: list[_Request] = field(default_factory=list)
    running: int = 0
    """Strands that neither wait for tokens, nor for strands of their own, nor have ended."""
    all_asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no strand runs, or once a workflow has failed."""
    failed: bool = False
    """Whether a workflow has raised, at which the others are not waited for."""

    def changed(self, by: int) -> None:
        self.running += by
        if self.running and not self.failed:
            self.all_asked.clear()
        else:
            self.all_asked.set()

    def ended(self, task: asyncio.Task[Any]) -> None:
        self.failed = self.failed or (not task.cancelled() and task.exception() is not None)
        self.changed(-1)


class Sampler:
    """Samples for the workflow of one prompt; made for each call of it.

    Args:
        prompt: the workflow's prompt.
        sampling: the run's parameters, or those of a validation.
        tokenizer: tokenizes what is observed.
        round_: the present round.
        name: name of this strand of the workflow, by which its random numbers differ from those of others.
        turns: the chat template between turns; None: the tokenizer has none.
    """

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        tokenizer: Any,
        round_: _Round,
        name: str = "",
        turns: TurnTemplate | None = None,
    ) -> None:
        self._prompt, self._sampling, self._tokenizer = prompt, sampling, tokenizer
        self._round, self._name, self._turns = round_, name, turns
        self._asked = self._forked = 0
        self._busy = False

    @property
    def n(self) -> int:
        """Responses to the prompt that the run wants, `rollout.n`."""
        return self._sampling.n

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens around it."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def observe(self, trajectory: Trajectory, messages: Sequence[Mapping[str, Any]]) -> None:
        """Append messages that follow a sampled segment, in the chat template, and the beginning of the next turn.

        The tokens that were sampled stay as they are: only those of the messages are added.

        Args:
            trajectory: its last segment is sampled.
            messages: all messages up to the policy's next turn, such as `{"role": "tool", "content": ...}`.

        Raises:
            RunError: the last segment is not sampled.
            ConfigError: there is no chat template, or it refuses these messages.
        """
        if not trajectory.segments or trajectory.segments[-1].role != "sampled":
            raise RunError("observe() follows a sampled segment: give all messages up to the policy's turn at once")
        if self._turns is None:
            raise ConfigError(
                "observe() with messages needs the tokenizer's chat template, and it has none; set "
                "model.chat_template, or use Trajectory.observe with tokens of Sampler.encode"
            )
        last = trajectory.segments[-1]
        tokens = self._turns.between(last.token_ids, last.finished, messages, self._prompt.tools)
        trajectory.observe(tokens, self._tokenizer.decode(tokens, skip_special_tokens=True))

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
        if not most:
            trajectory.truncated = True
            return Segment("sampled", _not_sampled((), ""))
        (columns,) = await self._columns(trajectory.token_ids, 1, most, stop)
        segment = Segment("sampled", columns)
        trajectory.append(segment)
        trajectory.truncated = not trajectory.left and not segment.finished
        return segment

    async def responses(self) -> list[Trajectory]:
        """Sample `n` single-turn responses; the prompt is computed once."""
        trajectories = [self.trajectory() for _ in range(self.n)]
        columns = await self._columns(self._prompt.token_ids, self.n, trajectories[0].left, ())
        for trajectory, each in zip(trajectories, columns, strict=True):
            trajectory.append(Segment("sampled", each))
            trajectory.truncated = not bool(each.finished[0])
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
            samplers.append(Sampler(self._prompt, self._sampling, self._tokenizer, self._round, name, self._turns))
            self._forked += 1

        going_on = len(samplers)

        async def strand(sampler: Sampler) -> T:
            nonlocal going_on
            try:
                return await run(sampler)
            finally:
                going_on -= 1
                if going_on:
                    self._round.changed(-1)  # this strand runs in place of the last one, without a moment between

        if not samplers:
            return []
        self._round.changed(len(samplers) - 1)  # this strand waits for them
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(strand(sampler)) for sampler in samplers]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _columns(self, token_ids: Sequence[int], n: int, most: int, stop: Sequence[str]) -> list[Completions]:
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
        request = _Request(uid, tuple(token_ids), sampling, asyncio.get_running_loop().create_future())
        self._busy = True
        self._round.requests.append(request)
        self._round.changed(-1)
        try:
            return await request.done
        except asyncio.CancelledError:
            if request.done.cancelled():  # otherwise `_answer` has counted this strand
                self._round.changed(1)
            raise
        finally:
            self._busy = False


async def single_turn(prompt: Prompt, sampler: Sampler) -> Sequence[Trajectory]:
    """Return `n` responses to the prompt: the default."""
    return await sampler.responses()


class WorkflowEngine:
    """An engine whose responses are those of a workflow; everything else is the engine's.

    Args:
        engine: samples.
        workflow: the workflow.
        name: its name, for messages.
        tokenizer: tokenizes what is observed.
        timeout: seconds after which a workflow that neither asks nor ends counts as hung.
        turns: the chat template between turns; None: the tokenizer has none.
    """

    def __init__(
        self,
        engine: Engine,
        workflow: Workflow,
        name: str,
        tokenizer: Any,
        timeout: float,
        turns: TurnTemplate | None = None,
    ) -> None:
        self._engine, self._workflow, self._name, self._tokenizer = engine, workflow, name, tokenizer
        self._timeout, self._turns = timeout, turns
        self._metrics: dict[str, float] = {}
        self._versions: list[int] = []
        """Of the weights that sampled for the present call."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def notes(self) -> Sequence[str]:
        return (*self._engine.notes, *getattr(self._workflow, "notes", ()))

    def update_weights(self, version: int) -> None:
        self._engine.update_weights(version)

    def sleep(self) -> None:
        self._engine.sleep()

    def health(self) -> bool:
        return self._engine.health()

    def close(self) -> None:
        getattr(self._workflow, "close", int)()
        self._engine.close()

    @property
    def metrics(self) -> dict[str, float]:
        """The engine's, of the last round, and `rollout/turns/mean`: sampled segments of a response."""
        return {**self._engine.metrics, **self._metrics}

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        """Return the responses of the prompts' workflows, in their order.

        Raises:
            RunError: a workflow failed, hangs, or returned other values than 1 to `n` trajectories of its prompt.
        """
        self._versions = []
        groups, dropped = asyncio.run(self._run(batch, sampling))
        trajectories = [trajectory for group in groups for trajectory in group]
        turns = [sum(segment.role == "sampled" for segment in each.segments) for each in trajectories]
        self._metrics = {"rollout/turns/mean": sum(turns) / len(turns)} if turns else {}
        done = [each.completion(i) for i, group in enumerate(groups) for each in group]
        joined = (
            Completions.concat(done, prompts=[0] * len(done))
            if done
            else _not_sampled((), "").select(torch.tensor([False]))
        )
        if not done:
            joined = replace(joined, weight_version=min(self._versions))
        return replace(joined, late=None if sampling.group_timeout is None else len(dropped), dropped=dropped)

    async def _run(self, batch: PromptBatch, sampling: Sampling) -> tuple[list[Sequence[Trajectory]], dict[int, str]]:
        """Run the workflows of a batch; return each one's trajectories, and index -> reason of those dropped."""
        round_ = _Round(running=len(batch))

        async def group(prompt: Prompt) -> Sequence[Trajectory] | GroupDropped:
            try:
                sampler = Sampler(prompt, sampling, self._tokenizer, round_, turns=self._turns)
                return self._checked(await self._workflow(prompt, sampler), prompt, sampling)
            except GroupDropped as reason:
                return reason
            except (ConfigError, RunError):
                raise
            except Exception as error:
                raise RunError(f"{self._of(prompt)} failed: {describe_error(error)}") from error

        tasks = [asyncio.create_task(group(prompt), name=prompt.uid) for prompt in batch.prompts]
        for task in tasks:
            task.add_done_callback(round_.ended)
        try:
            while not all(task.done() for task in tasks):
                await self._all_asked(round_, tasks)
                for task in tasks:
                    if task.done():
                        task.result()  # raises
                self._answer(round_)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        results = [task.result() for task in tasks]
        dropped = {i: str(result) for i, result in enumerate(results) if isinstance(result, GroupDropped)}
        return [() if isinstance(result, GroupDropped) else result for result in results], dropped

    async def _all_asked(self, round_: _Round, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Wait until every workflow waits for tokens or has ended."""
        try:
            async with asyncio.timeout(self._timeout):
                await round_.all_asked.wait()
        except TimeoutError:
            hung = [task.get_name() for task in tasks if not task.done()]
            raise RunError(
                f"rollout.workflow={shown(self._name)}: after {self._timeout:g} s one of the workflows of these "
                f"prompts has neither asked for tokens nor ended: {', '.join(hung[:8])}; give what it waits for a time "
                "limit, or raise trainer.process_group_timeout"
            ) from None

    def _answer(self, round_: _Round) -> None:
        """Sample what was asked for, and let the workflows go on.

        An engine with `generate_each` gets all of it at once; another one a batch for each kind of parameters.
        """
        requests = [each for each in round_.requests if not each.done.done()]  # a strand may have been cancelled
        round_.requests = []
        # of the class that has `generate`: an engine that wraps or extends another one's samples in a way of its own
        owner = next((kind for kind in type(self._engine).__mro__ if "generate" in vars(kind)), object)
        generate_each = vars(owner).get("generate_each")
        kinds: dict[Sampling | None, list[_Request]] = {}
        for request in sorted(requests, key=lambda each: each.uid):
            kinds.setdefault(None if generate_each else request.sampling, []).append(request)
        for together in kinds.values():
            prompts = PromptBatch(tuple(Prompt(each.uid, "", each.token_ids, None, {}) for each in together))
            if generate_each:
                done = generate_each(self._engine, prompts, [each.sampling for each in together])
            else:
                done = self._engine.generate(prompts, together[0].sampling)
            self._versions.append(done.weight_version)
            for i, (request, part) in enumerate(zip(together, done.by_prompt(len(together)), strict=True)):
                round_.changed(1)
                if i in done.dropped:
                    request.done.set_exception(GroupDropped(done.dropped[i]))
                else:
                    request.done.set_result(part.split([1] * len(part)))

    def _checked(self, result: Any, prompt: Prompt, sampling: Sampling) -> Sequence[Trajectory]:
        trajectories = [*result] if isinstance(result, list | tuple) else []
        right = all(
            isinstance(each, Trajectory)
            and each.prompt is prompt
            and any(segment.role == "sampled" for segment in each.segments)
            for each in trajectories
        )
        distinct = len({id(each) for each in trajectories}) == len(trajectories)
        if not (right and distinct and 1 <= len(trajectories) <= sampling.n):
            raise RunError(
                f"{self._of(prompt)} returned {shown(result)}: return a list of 1 to {sampling.n} different "
                "trajectories of sampler.trajectory(), each with a sampled segment"
            )
        return trajectories

    def _of(self, prompt: Prompt) -> str:
        return f"rollout.workflow={shown(self._name)} on the prompt {prompt.uid} {prompt.place}".rstrip()


def with_workflow(
    engine: Engine, name: str, tokenizer: Any, timeout: float, turns: TurnTemplate | None = None, config: Any = None
) -> Engine:
    """Return the engine of the run's workflow; single turns need none around the engine itself.

    Args:
        engine: samples for the workflow.
        name: `rollout.workflow`.
        tokenizer: the model's.
        timeout: `trainer.process_group_timeout`, in seconds.
        turns: the chat template between turns; None: the tokenizer has none.
        config: the run's settings, for a workflow that is a class.

    Raises:
        ConfigError: the workflow is no coroutine, nor a class whose instances are.
    """
    if name == DEFAULT:
        return engine
    workflow = WORKFLOWS.load(name)
    if inspect.isclass(workflow):
        workflow = workflow(WorkflowParts(config, tokenizer, turns))
    if not inspect.iscoroutinefunction(workflow) and not inspect.iscoroutinefunction(type(workflow).__call__):
        raise ConfigError(f"rollout.workflow={shown(name)} is no coroutine; write `async def`")
    return WorkflowEngine(engine, workflow, name, tokenizer, timeout, turns)


def _not_sampled(token_ids: Sequence[int], text: str) -> Completions:
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
