"""The workflows `environment` and `tools`: trajectories in environments, and in the loop of tool calls."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hwgrpo.agents.action import Action, CallFormat, ParsedTurn, StepResult
from hwgrpo.agents.agent_rows import OpenedRow
from hwgrpo.agents.call_formats import detect_call_format
from hwgrpo.agents.environments import (
    SHOWN_CHARS,
    EnvironmentFailure,
    EnvironmentKind,
    Instance,
    Instances,
    environment_of,
    environments_of,
    load_environments,
)
from hwgrpo.agents.tool_answers import OBSERVATION, Tools, check_observations
from hwgrpo.agents.tools import load_tools
from hwgrpo.catalog import CALL_FORMATS
from hwgrpo.data.chat_template import shows_tools
from hwgrpo.data.observed_images import without_images
from hwgrpo.errors import ConfigError, DataError, quoted
from hwgrpo.rollout.turn_template import HistoryRefused, TurnTemplate
from hwgrpo.rollout.workflow import Sampler, Trajectory, WorkflowParts
from hwgrpo.values import Prompt

DESCRIBED = (
    "the chat template shows no tools: a system message describes them, with calls as <tool_call>{...}</tool_call>"
)
OUTCOME: Mapping[str, str] = {
    "environment": "its name; empty for tools alone",
    "reward": "sum of the rewards of the turns",
    "turn_rewards": "the reward of each turn",
    "states": "of each turn: a text by which states are equal, or null",
    "stop": "why it ended: `done`, `max_turns`, `length` or `failed`",
    "failure": "how the environment failed; empty where it did not",
    "calls": "tool -> calls",
    "failed_calls": "kind of failure -> calls",
    "seconds": "tool -> seconds",
    "messages": "the turns and what was observed, as chat messages",
}
"""Keys of a trajectory's outcome."""


class EnvironmentWorkflow:
    """The workflow of `rollout.agent`: every response is an episode with the row's environment, and with tools.

    A turn that calls tools is answered by their results, every other one by the environment. Without an environment the
    trajectory ends with the first turn that calls no tool.

    Args:
        parts: the run's settings, tokenizer and chat template between turns.

    Raises:
        ConfigError: a setting of `rollout.agent` is wrong, or there is no chat template, or none that may go on.
    """

    def __init__(self, parts: WorkflowParts) -> None:
        agent, tokenizer = parts.config.rollout.agent, parts.tokenizer
        if parts.turns is None:
            raise ConfigError(
                f"rollout.workflow={parts.config.rollout.workflow} needs the tokenizer's chat template between turns, "
                "and it has none; set model.chat_template"
            )
        if agent.environments:
            check_observations(parts.turns)
        self._agent, self._tokenizer, self._template = agent, tokenizer, parts.turns
        kinds = load_environments(environments_of(parts.config.rollout), parts.config.data.ground_truth_key)
        self._kinds, self._instances = kinds, Instances(agent.turn_timeout)
        self._parse = call_format(agent, tokenizer)
        level = parts.config.reward.sandbox.level
        self._tools = Tools(load_tools(agent.tools, folder=os.getcwd(), sandbox_level=level), parts.turns, tokenizer)
        described = agent.tools and not shows_tools(tokenizer.chat_template)
        self.notes: tuple[str, ...] = (
            *self._tools.notes,
            *((DESCRIBED,) if described else ()),
            *_fork_notes(parts.turns, [*([OBSERVATION] if agent.environments else []), self._tools.probe]),
        )
        """Lines about how it runs, printed once at the start."""

    async def __call__(self, prompt: Prompt, sampler: Sampler) -> Sequence[Trajectory]:
        return await sampler.gather(lambda own: self._trajectory(prompt, own))

    def close(self) -> None:
        """End the processes of tools, and close the environments."""
        try:
            self._tools.close()
        finally:
            self._instances.close()

    async def _trajectory(self, prompt: Prompt, sampler: Sampler) -> Trajectory:
        """Return one finished trajectory with its outcome."""
        trajectory, kind = sampler.trajectory(), self._kind_of(prompt)
        record = Record("" if kind is None else kind.name)
        clock = Clock(self._agent.turn_timeout, self._agent.trajectory_timeout)
        instance = None if kind is None else self._instances.get(kind)
        try:
            if instance is not None:
                with clock:
                    await self._reset(instance, prompt, clock.left)
            await self._turns(trajectory, sampler, instance, record, clock)
            if instance is not None:
                record.finish(await instance.finish(self._agent.turn_timeout))
        except EnvironmentFailure as failure:
            if instance is not None:
                instance.discard()
            instance = None  # a call may still run in it
            if not trajectory.segments:  # a trajectory has a turn
                await sampler.sample(trajectory, max_tokens=1)
            record.fail(str(failure), sum(segment.role == "sampled" for segment in trajectory.segments))
        except BaseException:  # cancelled, as where the group is late
            if instance is not None:
                instance.discard()
            raise
        trajectory.outcome = outcome = Outcome(record.outcome())
        if instance is not None:
            outcome.environment = getattr(instance.environment, "for_rewards", None)
            if outcome.environment is None:
                self._instances.put_back(instance)
            else:
                weakref.finalize(outcome, self._instances.put_back, instance).atexit = False
        trajectory.finished = record.stop in ("done", "max_turns")
        return trajectory

    async def _reset(self, instance: Instance, prompt: Prompt, seconds: float) -> None:
        """Begin an episode; its prompt was made when the data was read."""
        row = prompt.columns
        opening = await instance.reset(row.original if isinstance(row, OpenedRow) else row, seconds)
        if isinstance(row, OpenedRow) and opening != row.opening:
            raise EnvironmentFailure(
                f"{instance.kind.name}.reset returned {quoted(opening, SHOWN_CHARS)}, and when the data was read "
                f"{quoted(row.opening, SHOWN_CHARS)}: it must return the same for the same row"
            )

    async def _turns(
        self, trajectory: Trajectory, sampler: Sampler, instance: Instance | None, record: Record, clock: Clock
    ) -> None:
        """Sample turns and observe their answers until the trajectory ends."""
        most_turns = self._agent.max_turns
        while True:
            state = None if instance is None else await instance.state(clock.left)
            segment = await sampler.sample(trajectory, max_tokens=self._agent.max_turn_tokens)
            if not segment.token_ids:
                record.stop = "length"
                return
            last = len(record.rewards) + 1 == most_turns
            action = self.action(segment.token_ids, segment.text, segment.finished, len(record.rewards), last=last)
            record.messages.append(action.message)  # also of a turn at which the environment fails
            with clock:
                step = await self._answer(action, instance, clock.left)
            clock.leave_out(step.queued)
            record.add(step, state)
            if trajectory.truncated or (step.done and instance is None and not segment.finished):
                record.stop = "length"  # a last turn that was cut is none that the policy ended
            elif step.done:
                record.stop = "done"
            elif last:
                record.stop = "max_turns"
            if record.stop:
                return
            self._observe(sampler, trajectory, step, action)
            record.messages += [without_images(message) for message in step.messages]
            if trajectory.truncated or not trajectory.left:
                trajectory.truncated, record.stop = True, "length"
                return

    def _observe(self, sampler: Sampler, trajectory: Trajectory, step: StepResult, action: Action) -> None:
        """Append what follows a turn.

        Raises:
            EnvironmentFailure: an image in it cannot be shown, or the history before it cannot be rewritten.
        """
        try:
            sampler.observe(trajectory, step.messages, turn=self._shown(action))
        except HistoryRefused as refusal:
            raise EnvironmentFailure(str(refusal)) from refusal
        except DataError as error:
            tools = ", ".join(dict.fromkeys(name for name, result in step.results if result.blocks))
            observed = f"what {tools} returned" if tools else "an observation"
            raise EnvironmentFailure(f"{observed} cannot be shown: {error}") from error

    async def _answer(self, action: Action, instance: Instance | None, seconds: float) -> StepResult:
        """Return the answer to a turn: of the tools that it calls, else of the environment."""
        own = {schema["function"]["name"] for schema in instance.tools} if instance is not None else {}
        if self._tools.answer(action, own):
            return (
                StepResult("") if action.last else await self._tools.step(action, seconds, own)
            )  # nothing reads the results
        return StepResult("", done=True) if instance is None else await instance.step(action, seconds)

    def action(self, token_ids: Sequence[int], text: str, finished: bool, turn: int, *, last: bool = False) -> Action:
        """Return a turn as an action.

        Args:
            token_ids: the sampled tokens.
            text: their text.
            finished: whether the policy ended its turn.
            turn: its number, from 0.
            last: whether it is the last one by `rollout.agent.max_turns`.
        """
        parsed = ParsedTurn(text)
        if self._parse is not None:
            tokens = token_ids[:-1] if self._template.has_end(token_ids, finished) else token_ids
            decoded = self._tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            parsed = self._parse(decoded)
            if finished and decoded.startswith(text):  # a call may end with what stops it, the content does not
                parsed = replace(parsed, content=parsed.content.removesuffix(decoded[len(text) :]))
        return Action(text, tuple(token_ids), finished, turn, parsed, last)

    def _shown(self, action: Action) -> Mapping[str, Any]:
        """Return a turn as the message of which the chat template shows the reasoning, too."""
        message, reasoning = action.message, action.parsed.reasoning
        if not reasoning or self._template.shows_reasoning_field:
            return message
        text = f"<think>\n{reasoning}\n</think>\n\n{action.content}" if action.calls else action.text
        return {**message, "content": text}

    def _kind_of(self, prompt: Prompt) -> EnvironmentKind | None:
        return environment_of(self._kinds, prompt.columns, 0, prompt.place) if self._kinds else None


def _fork_notes(turns: TurnTemplate, answers: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return a line for each kind of answers at which the chat template rewrites a turn."""
    found = dict.fromkeys(turns.rewrites(answer) for answer in answers if answer)
    return [f"{how}: a trajectory then goes on in a further row (agent/forks)" for how in found if how]


def call_format(agent: Any, tokenizer: Any) -> CallFormat | None:
    """Return what reads tool calls; None where the model has no tools and no format of its own.

    Args:
        agent: `rollout.agent`.
        tokenizer: has the chat template.

    Raises:
        ConfigError: there are tools, and the chat template does not say how they are called.
    """
    name = agent.call_format
    if name == "auto":
        described = not shows_tools(tokenizer.chat_template)
        name = "hermes" if described else detect_call_format(str(tokenizer.chat_template))
    if name is None and agent.tools:
        raise ConfigError(
            "rollout.agent.call_format=auto: the chat template does not show how the model calls tools; set it to one "
            f"of {', '.join(CALL_FORMATS.names())}"
        )
    return None if name is None else CALL_FORMATS.load(name)


class Outcome(dict[str, Any]):
    """What happened in a trajectory, as JSON has it, with the environment that reward functions read.

    A copy, as for another process, is a plain dict.
    """

    environment: Any = None
    """The environment's `for_rewards`; None: it has none, or failed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class Clock:
    """The time limits of one trajectory: its environment's and tools' time, per turn and in all.

    Args:
        turn: seconds per turn.
        trajectory: seconds of all turns; None: any.
    """

    def __init__(self, turn: float, trajectory: float | None) -> None:
        self._turn, self._all = turn, float("inf") if trajectory is None else trajectory
        self._since = 0.0

    @property
    def left(self) -> float:
        """Seconds that the next answer may take."""
        return max(0.0, min(self._turn, self._all))

    def leave_out(self, seconds: float) -> None:
        """Count some of the seconds of the last answer no longer."""
        self._all += seconds

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._all -= time.monotonic() - self._since


class Record:
    """What happens in a trajectory.

    Args:
        environment: name of its environment; "": none.
    """

    def __init__(self, environment: str) -> None:
        self.environment = environment
        self.rewards: list[float] = []
        self.states: list[str | None] = []
        self.messages: list[dict[str, Any]] = []
        self.stop = self.failure = ""
        self._calls: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        self._seconds: dict[str, float] = {}

    def add(self, step: StepResult, state: str | None) -> None:
        """Add the answer to a turn."""
        self.rewards.append(step.reward)
        self.states.append(state)
        for name, result in step.results:
            self._calls[name] = self._calls.get(name, 0) + 1
            self._seconds[name] = self._seconds.get(name, 0.0) + result.seconds
            if result.failure:
                self._failed[result.failure] = self._failed.get(result.failure, 0) + 1

    def fail(self, failure: str, turns: int) -> None:
        """End with a failure, after so many turns, of which the last ones have no answer."""
        self.failure, self.stop = failure, "failed"
        unanswered = turns - len(self.rewards)
        self.rewards += [0.0] * unanswered
        self.states += [None] * unanswered

    def finish(self, reward: float) -> None:
        """Add a reward of the whole trajectory to that of its last turn."""
        if self.rewards:
            self.rewards[-1] += reward

    def outcome(self) -> dict[str, Any]:
        """Return it as JSON has it; see `OUTCOME` for the keys."""
        return {
            "environment": self.environment,
            "reward": sum(self.rewards),
            "turn_rewards": self.rewards,
            "states": self.states,
            "stop": self.stop,
            "failure": self.failure,
            "calls": self._calls,
            "failed_calls": self._failed,
            "seconds": self._seconds,
            "messages": self.messages,
        }
