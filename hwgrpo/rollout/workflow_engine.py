"""How the workflows of a batch get their tokens: in rounds, or each as soon as it asks.

In rounds, all that was asked for is sampled when every workflow waits for tokens: at once by an engine with sessions or
`generate_each`, else those with the same parameters and limit of tokens in one batch. What shares a batch depends on
the workflows alone, not on how fast one is; so do the numbers.
Asynchronously (`rollout.agent.asynchronous`), a request is sampled beside others as soon as it comes. Tokens are the
same up to rounding, which depends on what shares a batch.
In a session a trajectory's next turn continues the keys and values of its last one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hwgrpo.catalog import WORKFLOWS
from hwgrpo.errors import ConfigError, RunError, shown
from hwgrpo.rollout.engine import Engine, Session, TurnRequest
from hwgrpo.rollout.turn_template import TurnTemplate
from hwgrpo.rollout.workflow import (
    GroupDropped,
    MakeWorkflow,
    Sampler,
    TokenRequest,
    Trajectory,
    Workflow,
    WorkflowParts,
    WorkflowRequests,
    not_sampled,
)
from hwgrpo.support.event_loops import run_outside_loops
from hwgrpo.user_code import describe_error
from hwgrpo.values import Completions, Prompt, PromptBatch, Sampling

DEFAULT = "single_turn"


class WorkflowEngine:
    """An engine whose responses are those of a workflow; everything else is the engine's.

    Args:
        engine: samples.
        workflow: the workflow.
        name: its name, for messages.
        tokenizer: tokenizes what is observed.
        timeout: seconds after which a workflow that neither asks nor ends counts as hung.
        turns: the chat template between turns; None: the tokenizer has none.
        asynchronous: sample what a workflow asks for at once, of an engine with sessions; false: in rounds.
    """

    def __init__(
        self,
        engine: Engine,
        workflow: Workflow,
        name: str,
        tokenizer: Any,
        timeout: float,
        turns: TurnTemplate | None = None,
        asynchronous: bool = False,
    ) -> None:
        self._engine, self._workflow, self._name, self._tokenizer = engine, workflow, name, tokenizer
        self._timeout, self._turns, self._asynchronous = timeout, turns, asynchronous
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
        try:
            getattr(self._workflow, "close", int)()
        finally:
            self._engine.close()

    @property
    def metrics(self) -> dict[str, float]:
        """The engine's, of its last session or round, and `rollout/turns/mean`: sampled segments of a response."""
        return {**self._engine.metrics, **self._metrics}

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        """Return the responses of the prompts' workflows, in their order.

        Raises:
            RunError: a workflow failed, hangs, or returned other values than 1 to `n` trajectories of its prompt.
        """
        self._versions = []
        returned: list[tuple[list[Sequence[Trajectory]], dict[int, str]]] = []

        async def run() -> None:
            returned.append(await self._run(batch, sampling))

        # asyncio.run formats what its coroutine returns as text (in signal.signal): all tensors of a batch
        run_outside_loops(lambda: asyncio.run(run()))
        ((groups, dropped),) = returned
        trajectories = [trajectory for group in groups for trajectory in group]
        turns = [sum(segment.role == "sampled" for segment in each.segments) for each in trajectories]
        self._metrics = {"rollout/turns/mean": sum(turns) / len(turns)} if turns else {}
        done = [each.completion(i) for i, group in enumerate(groups) for each in group]
        joined = (
            Completions.concat(done, prompts=[0] * len(done))
            if done
            else not_sampled((), "").select(torch.tensor([False]))
        )
        if not done:
            joined = replace(joined, weight_version=min(self._versions))
        return replace(joined, late=None if sampling.group_timeout is None else len(dropped), dropped=dropped)

    async def _run(self, batch: PromptBatch, sampling: Sampling) -> tuple[list[Sequence[Trajectory]], dict[int, str]]:
        """Run the workflows of a batch; return each one's trajectories, and index -> reason of those dropped."""
        asked = WorkflowRequests(running=len(batch))

        async def group(prompt: Prompt) -> Sequence[Trajectory] | GroupDropped:
            try:
                sampler = Sampler(prompt, sampling, self._tokenizer, asked, turns=self._turns)
                return self._checked(await self._workflow(prompt, sampler), prompt, sampling)
            except GroupDropped as reason:
                return reason
            except (ConfigError, RunError):
                raise
            except Exception as error:
                raise RunError(f"{self._of(prompt)} failed: {describe_error(error)}") from error
            finally:
                asked.forget(lambda trajectory, _: trajectory.prompt is prompt)

        session = self._open_session(batch, sampling)
        tasks = [asyncio.create_task(group(prompt), name=prompt.uid) for prompt in batch.prompts]
        for task in tasks:
            task.add_done_callback(asked.ended)
        try:
            if self._asynchronous and session is not None:
                await self._sample_at_once(asked, tasks, session)
            else:
                await self._sample_in_rounds(asked, tasks, session)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if session is not None:
                session.close()
        results = [task.result() for task in tasks]
        dropped = {i: str(result) for i, result in enumerate(results) if isinstance(result, GroupDropped)}
        return [() if isinstance(result, GroupDropped) else result for result in results], dropped

    async def _sample_in_rounds(
        self, asked: WorkflowRequests, tasks: Sequence[asyncio.Task[Any]], session: Session | None
    ) -> None:
        """Sample what all workflows have asked for, whenever each of them waits for tokens or has ended."""
        while not all(task.done() for task in tasks):
            await self._wait(asked.all_asked, tasks)
            _raise_errors(tasks)
            requests = asked.unsampled()
            if session is None:
                self._generate(asked, requests)
                continue
            session.release(asked.take_over())
            if requests:
                numbers = self._submit(session, requests)
                while session.busy:
                    session.advance()
                self._answer(asked, requests, session.take(numbers))

    async def _sample_at_once(
        self, asked: WorkflowRequests, tasks: Sequence[asyncio.Task[Any]], session: Session
    ) -> None:
        """Sample what a workflow asks for while others' responses are sampled; between two steps the workflows run.

        A session that samples elsewhere has no steps: the workflows run until a request has come or ended.
        """
        sampled: dict[int, TokenRequest] = {}
        notify: Callable[[Callable[[], object]], None] | None = getattr(session, "notify", None)
        if notify is not None:
            loop = asyncio.get_running_loop()
            notify(lambda: loop.call_soon_threadsafe(asked.news.set))
        while not all(task.done() for task in tasks):
            if sampled and notify is not None:
                await asked.news.wait()
            elif not sampled and not asked.requests:
                await self._wait(asked.news, tasks)
            asked.news.clear()
            if asked.failed:
                _raise_errors(tasks)
            cancelled = [number for number, request in sampled.items() if request.done.done()]
            session.cancel(cancelled)
            for number in cancelled:
                del sampled[number]
            session.release(asked.take_over())
            requests = asked.unsampled()
            if requests:
                sampled |= zip(self._submit(session, requests), requests, strict=True)
            ended = session.advance() if sampled else []
            if ended:
                self._answer(asked, [sampled.pop(number) for number in ended], session.take(ended))
            await asyncio.sleep(0)

    async def _wait(self, event: asyncio.Event, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Wait for an event of the workflows.

        Raises:
            RunError: it does not come in time.
        """
        try:
            async with asyncio.timeout(self._timeout):
                await event.wait()
        except TimeoutError:
            hung = [task.get_name() for task in tasks if not task.done()]
            raise RunError(
                f"rollout.workflow={shown(self._name)}: after {self._timeout:g} s one of the workflows of these "
                f"prompts has neither asked for tokens nor ended: {', '.join(hung[:8])}; give what it waits for a time "
                "limit, or raise trainer.process_group_timeout"
            ) from None

    def _open_session(self, batch: PromptBatch, sampling: Sampling) -> Session | None:
        open_session = self._method("open_session")
        if open_session is None or not len(batch):
            return None
        longest = max(len(prompt.token_ids) for prompt in batch.prompts) + sampling.max_response_tokens
        return open_session(longest, room=sampling.max_response_tokens, group_timeout=sampling.group_timeout)

    def _method(self, name: str) -> Callable[..., Any] | None:
        """Return a further method of the engine; None: it has none.

        It is of the class that has `generate`: an engine that wraps or extends another one's samples in a way of its
        own.
        """
        owner = next((kind for kind in type(self._engine).__mro__ if "generate" in vars(kind)), object)
        method = vars(owner).get(name)
        return None if method is None else partial(method, self._engine)

    def _submit(self, session: Session, requests: Sequence[TokenRequest]) -> list[int]:
        turns = [TurnRequest(each.prompt, each.sampling, kept=True, continues=each.continues) for each in requests]
        numbers = session.submit(turns)
        for number, request in zip(numbers, requests, strict=True):
            request.number = number
        return numbers

    def _generate(self, asked: WorkflowRequests, requests: Sequence[TokenRequest]) -> None:
        """Sample without a session: at once by an engine with `generate_each`, else each kind of parameters."""
        generate_each = self._method("generate_each")
        kinds: dict[Sampling | None, list[TokenRequest]] = {}
        for request in requests:
            kinds.setdefault(None if generate_each else request.sampling, []).append(request)
        for together in kinds.values():
            prompts = PromptBatch(tuple(each.prompt for each in together))
            if generate_each:
                done = generate_each(prompts, [each.sampling for each in together])
            else:
                done = self._engine.generate(prompts, together[0].sampling)
            self._answer(asked, together, done)

    def _answer(self, asked: WorkflowRequests, requests: Sequence[TokenRequest], done: Completions) -> None:
        """Let the workflows go on that have asked for these responses."""
        self._versions.append(done.weight_version)
        for i, (request, part) in enumerate(zip(requests, done.by_prompt(len(requests)), strict=True)):
            if i in done.dropped:
                asked.answer(request, GroupDropped(done.dropped[i]))
            else:
                asked.answer(request, part.split([1] * len(part)))

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
    engine: Engine,
    name: str,
    tokenizer: Any,
    timeout: float,
    turns: TurnTemplate | None = None,
    config: Any = None,
    make: MakeWorkflow | None = None,
) -> Engine:
    """Return the engine of the run's workflow; single turns need none around the engine itself.

    Args:
        engine: samples for the workflow.
        name: `rollout.workflow`.
        tokenizer: the model's.
        timeout: `trainer.process_group_timeout`, in seconds.
        turns: the chat template between turns; None: the tokenizer has none.
        config: the run's settings, for a workflow that is a class; None: it is none, and works in rounds.
        make: makes the workflow; None: it is the one of that name.

    Raises:
        ConfigError: the workflow is no coroutine, nor a class whose instances are.
    """
    if name == DEFAULT and make is None:
        return engine
    named: Any = WORKFLOWS.load(name) if make is None else make(WorkflowParts(config, tokenizer, turns))
    workflow = named
    if inspect.isclass(workflow):
        workflow = named(WorkflowParts(config, tokenizer, turns))
    if not inspect.iscoroutinefunction(workflow) and not inspect.iscoroutinefunction(type(workflow).__call__):
        raise ConfigError(f"rollout.workflow={shown(name)} is no coroutine; write `async def`")
    asynchronous = config is not None and config.rollout.agent.asynchronous
    return WorkflowEngine(engine, workflow, name, tokenizer, timeout, turns, asynchronous)


def _raise_errors(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
