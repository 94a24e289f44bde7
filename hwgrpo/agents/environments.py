"""Environments of the user's own: the protocol, calls with a time limit, choice by row, and reuse of instances."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from hwgrpo.agents.action import Action, Message, StepResult
from hwgrpo.agents.background_loop import LONGEST
from hwgrpo.catalog import ENVIRONMENTS
from hwgrpo.data.observed_images import check_parts
from hwgrpo.errors import ConfigError, DataError, choice_error, quoted, shown
from hwgrpo.own_copies import own_copy
from hwgrpo.support.given_objects import find_object, is_object, name_of
from hwgrpo.user_code import describe_error, names_a_file, split_name

SHOWN_CHARS = 200
"""Characters of a value that an error shows."""


class Environment(Protocol):
    """What a policy acts in: one instance serves one trajectory at a time, and many one after another.

    `reset` and `step` may be `async`. Each call, and making an instance, runs in a thread of its own: an instance may
    keep connections open, and a call that waits keeps nothing else waiting. Python cannot end a thread: a call that
    takes longer than `rollout.agent.turn_timeout` is abandoned with its instance.

    Further attributes that are read where an environment has them:

    - `tools`: JSON schemas that the chat template shows the model.
    - `finish()`: called once when a trajectory has ended without a failure; it returns a reward that is added to that
      of the last turn, or None. It may be `async`.
    - `for_rewards`: an object that reward functions of TRL's form get in `environments`. The instance serves no other
      trajectory until the response has been scored and dropped.
    - `state()`: a text by which states are equal, for estimators that compare the turns of a group (`gigpo`).
    - `close()`: frees its resources; it may be `async`. Of an instance that failed it is called once no call runs in
      it.

    Example:
        >>> class Guess:
        ...     def reset(self, row):
        ...         self.number = row["number"]
        ...         return "Guess my number from 1 to 9."
        ...
        ...     def step(self, action):
        ...         if action.content.strip() == str(self.number):
        ...             return StepResult("", reward=1.0, done=True)
        ...         return StepResult("No. Try again.")
    """

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Begin an episode.

        Args:
            row: the data row's columns.

        Returns:
            What the prompt is: chat messages instead of the row's; text that is appended to the row's last user
            message, or is the prompt of a row without one; or None for the row's own prompt. The same for every call
            with the same row: the prompt is made when the data is read.
        """
        ...

    def step(self, action: Action) -> Any:
        """Answer a turn of the policy with a `StepResult`, or `(observation, reward, done)`."""
        ...


class EnvironmentFailure(Exception):
    """An environment failed; its text says how."""


@dataclass(frozen=True)
class EnvironmentKind:
    """A configured environment: its name, and what makes an instance."""

    name: str
    make: Callable[[], Any]
    weight: float
    key: str
    """The setting, for messages."""


def environments_of(rollout: Any) -> Sequence[Any]:
    """Return `rollout.agent.environments`; none where the workflow acts in none.

    Args:
        rollout: the run's settings (`RolloutConfig`).
    """
    return rollout.agent.environments if rollout.workflow == "environment" else ()


def load_environments(entries: Sequence[Any], ground_truth_key: str | None = None) -> tuple[EnvironmentKind, ...]:
    """Return the environments of `rollout.agent.environments`.

    Args:
        entries: `EnvironmentConfig`s.
        ground_truth_key: `data.ground_truth_key`, which a registered class with a parameter of this name gets where its
            `kwargs` have none.

    Raises:
        ConfigError: a name is unknown or used twice, or a class has no `reset` and `step`.
    """
    kinds: dict[str, EnvironmentKind] = {}
    for number, entry in enumerate(entries):
        key = f"rollout.agent.environments.{number}.name"
        given = is_object(entry.name)
        loaded = find_object(entry.name, key) if given else ENVIRONMENTS.load(entry.name)
        name = entry.label or (name_of(entry.name) if given else split_name(entry.name)[1])
        missing = [each for each in ("reset", "step") if inspect.isclass(loaded) and not hasattr(loaded, each)]
        if missing:
            raise ConfigError(f"{key}={shown(entry.name)} has no method {missing[0]!r}; see docs/agents.md")
        if name in kinds:
            raise ConfigError(
                f"{key}={shown(entry.name)}: {kinds[name].key} has the same name {name!r}, by which rows choose; give "
                "one of them a label"
            )
        kwargs = dict(entry.kwargs)
        registered = not given and not names_a_file(entry.name)
        if registered and ground_truth_key and "ground_truth_key" in inspect.signature(loaded).parameters:
            kwargs.setdefault("ground_truth_key", ground_truth_key)
        kinds[name] = EnvironmentKind(name, _maker(loaded, kwargs, f"{key}={shown(entry.name)}"), entry.weight, key)
    return tuple(kinds.values())


def _maker(loaded: Callable[..., Any], kwargs: Mapping[str, Any], setting: str) -> Callable[[], Any]:
    def make() -> Any:
        try:
            return loaded(**own_copy(dict(kwargs)))
        except ConfigError as error:
            raise ConfigError(f"{setting}: {error}") from error
        except Exception as error:
            raise ConfigError(f"{setting}: making it failed: {describe_error(error)}") from error

    return make


def environment_of(kinds: Sequence[EnvironmentKind], row: Mapping[str, Any], index: int, place: str) -> EnvironmentKind:
    """Return the environment of a row: of its column `environment`, else one by weight.

    Args:
        kinds: at least one.
        row: the data row.
        index: of the row; which environment it gets by weight depends on it alone.
        place: file and line, for messages.

    Raises:
        ConfigError: the column names none of them.
    """
    if len(kinds) == 1:
        return kinds[0]
    wanted = row.get("environment")
    if isinstance(wanted, str):
        by_name = {kind.name: kind for kind in kinds}
        if wanted not in by_name:
            raise choice_error(f"{place}: environment", wanted, by_name)
        return by_name[wanted]
    share = zlib.crc32(str(index).encode()) / 2**32 * sum(kind.weight for kind in kinds)
    sums = itertools.accumulate(kind.weight for kind in kinds)
    return next((kind for kind, end in zip(kinds, sums, strict=True) if share < end), kinds[-1])


class Instance:
    """One instance of an environment; its methods are called in threads.

    Args:
        kind: the environment.
    """

    def __init__(self, kind: EnvironmentKind) -> None:
        self.kind = kind
        self.environment: Any = None
        """None: not made yet, which the first `reset` does."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        """Of the newest call."""

    @property
    def tools(self) -> list[Mapping[str, Any]]:
        """JSON schemas of the tools that it has."""
        return list(getattr(self.environment, "tools", None) or ())

    async def reset(self, row: Mapping[str, Any], seconds: float) -> list[Message] | str | None:
        """Begin an episode; return what belongs to the prompt.

        Args:
            row: the data row; the environment gets a copy.
            seconds: the time limit.

        Raises:
            EnvironmentFailure: it raised, was late, or returned neither messages, text nor None.
            ConfigError: it cannot be made.
        """
        if self.environment is None:
            problem = await self._in_thread(f"making {self.kind.name}", self._make, seconds)
            if problem is not None:
                raise problem
        opening = await self._call("reset", seconds, own_copy(dict(row)))
        if opening is None or isinstance(opening, str):
            return None if opening is None else encodable(opening)
        return checked_messages(opening, f"{self.kind.name}.reset")

    async def step(self, action: Action, seconds: float) -> StepResult:
        """Return the environment's answer to a turn.

        Args:
            action: the turn.
            seconds: the time limit.

        Raises:
            EnvironmentFailure: it raised, was late, or returned no valid step.
        """
        return checked_step(await self._call("step", seconds, action), f"{self.kind.name}.step")

    async def finish(self, seconds: float) -> float:
        """End the episode; return the reward that is added to the last turn's.

        Args:
            seconds: the time limit.

        Raises:
            EnvironmentFailure: it raised, was late, or returned no finite number.
        """
        if not hasattr(self.environment, "finish"):
            return 0.0
        reward = await self._call("finish", seconds)
        return 0.0 if reward is None else checked_reward(reward, f"{self.kind.name}.finish")

    async def state(self, seconds: float) -> str | None:
        """Return the text by which states are equal; None where the environment has none."""
        if not hasattr(self.environment, "state"):
            return None
        state = await self._call("state", seconds)
        return None if state is None else str(state)

    def close(self) -> None:
        """Close the environment."""
        close = getattr(self.environment, "close", None)
        if callable(close):
            self._awaited(close())

    def discard(self) -> None:
        """Close the environment in a thread, once the call that is in it has returned, if one is."""

        def run() -> None:
            if self._thread is not None:
                self._thread.join(LONGEST)
                if self._thread.is_alive():
                    return
            with suppress(Exception):  # it has failed before
                self.close()

        threading.Thread(target=run, name=f"{self.kind.name}.close", daemon=True).start()

    def _make(self) -> ConfigError | None:
        """Make the environment; return why it cannot be made."""
        try:
            self.environment = self.kind.make()
        except ConfigError as error:
            return error
        return None

    def _awaited(self, value: Any) -> Any:
        """Return what a method has returned, of a coroutine its result."""
        if not inspect.isawaitable(value):
            return value
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(value)

    async def _call(self, name: str, seconds: float, *arguments: Any) -> Any:
        """Call a method in a thread of its own, which is abandoned after the time limit."""
        method = getattr(self.environment, name)
        return await self._in_thread(f"{self.kind.name}.{name}", lambda: method(*arguments), seconds)

    async def _in_thread(self, where: str, call: Callable[[], Any], seconds: float) -> Any:
        """Return the result of a call in a thread of its own, which is abandoned after the time limit."""
        loop, running = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def answer(value: Any, error: BaseException | None) -> None:
            if not running.done():
                running.set_result((value, error))

        def run() -> None:
            value, error = None, None
            try:
                value = self._awaited(call())
            except BaseException as raised:  # of user code, in a thread of its own: `exit()` must not end it silently
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(answer, value, error)

        self._thread = threading.Thread(target=run, name=where, daemon=True)
        self._thread.start()
        try:
            value, error = await asyncio.wait_for(running, max(seconds, 0.0))
        except TimeoutError:
            raise EnvironmentFailure(f"{where} took longer than {seconds:.3g} s") from None
        if error is not None:
            raise EnvironmentFailure(f"{where} {describe_error(error)}") from error
        return value


class Instances:
    """Instances of environments, each used by one trajectory at a time and kept for the next one.

    Args:
        seconds: `rollout.agent.turn_timeout`, in which all instances close.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._free: dict[str, list[Instance]] = {}
        self._closed = False

    def get(self, kind: EnvironmentKind) -> Instance:
        """Return an instance that nothing uses."""
        free = self._free.setdefault(kind.name, [])
        return free.pop() if free else Instance(kind)

    def put_back(self, instance: Instance) -> None:
        """Keep an instance for another trajectory. One that failed is not put back: a call may still run in it."""
        if self._closed:
            close_all([instance], self._seconds)
        else:
            self._free.setdefault(instance.kind.name, []).append(instance)

    def close(self) -> None:
        """Close all instances that nothing uses, and others when they are put back."""
        self._closed = True
        instances = [each for free in self._free.values() for each in free]
        self._free.clear()
        close_all(instances, self._seconds)


def close_all(instances: Sequence[Instance], seconds: float) -> None:
    """Close instances at the same time, each in a thread of its own; those that are late are abandoned.

    Args:
        instances: nothing uses them.
        seconds: the time limit of all, `rollout.agent.turn_timeout`.

    Raises:
        Exception: what one of them raised, once all are closed or late.
    """
    errors: list[BaseException] = []

    def close(instance: Instance) -> None:
        try:
            instance.close()
        except BaseException as error:  # of user code, in a thread of its own: `exit()` must not end it silently
            errors.append(error)

    threads = [
        threading.Thread(target=close, args=(each,), name=f"{each.kind.name}.close", daemon=True) for each in instances
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = [thread.name for thread in threads if thread.is_alive()]
    if late:
        names = ", ".join(sorted({*late}))
        what = f"{len(late)} of {len(threads)} environments did not close within {seconds:g} s"
        print(f"hwgrpo: {what} (rollout.agent.turn_timeout): {names}", file=sys.stderr, flush=True)
    if errors:
        raise errors[0]


def checked_messages(messages: Any, where: str) -> list[Message]:
    """Return messages of an environment as a list.

    Raises:
        EnvironmentFailure: they are not chat messages with text, or there is none.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise EnvironmentFailure(f"{where} returned {quoted(messages, SHOWN_CHARS)}, not text or a list of messages")
    if not messages:
        raise EnvironmentFailure(
            f"{where} returned no message; return text, which may be empty, or at least one message"
        )
    for message in messages:
        fits = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        content = message.get("content") if fits else None
        if not isinstance(content, str | list | tuple):
            raise EnvironmentFailure(
                f'{where} returned the message {quoted(message, SHOWN_CHARS)}; expected {{"role": "user", "content": '
                '"..."}'
            )
        if not isinstance(content, str):
            try:
                check_parts(content, f"{where} returned a message whose content")
            except DataError as error:
                raise EnvironmentFailure(str(error)) from error
    return [{**message, "content": _encodable_content(message["content"])} for message in messages]


def _encodable_content(content: str | Sequence[Any]) -> Any:
    """Return a text, also for blocks of text alone, or blocks, with text that a tokenizer accepts."""
    if isinstance(content, str):
        return encodable(content)
    parts = [{**part, "text": encodable(part["text"])} if part["type"] == "text" else part for part in content]
    return "".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


def encodable(text: str) -> str:
    """Return a text that a tokenizer accepts: half of a surrogate pair becomes "?"."""
    return text.encode("utf-8", "replace").decode()


def checked_step(value: Any, where: str) -> StepResult:
    """Return a step of an environment, `(observation, reward, done)` included.

    Raises:
        EnvironmentFailure: it is none, its reward is no finite number, or its observation is neither text nor messages.
    """
    if isinstance(value, tuple) and len(value) == 3:
        value = StepResult(*value)
    if not isinstance(value, StepResult):
        raise EnvironmentFailure(
            f"{where} returned {quoted(value, SHOWN_CHARS)}; expected a StepResult, or (observation, reward, done)"
        )
    reward = checked_reward(value.reward, where)
    observation = encodable(value.observation) if isinstance(value.observation, str) else None
    if observation is None and not value.done:
        observation = checked_messages(value.observation, where)
    return StepResult(observation or "", reward, bool(value.done), value.results)


def checked_reward(value: Any, where: str) -> float:
    """Return a reward of an environment as a number.

    Raises:
        EnvironmentFailure: it is no finite number.
    """
    try:
        reward = float(value)
    except (TypeError, ValueError, OverflowError):
        reward = float("nan")
    if not abs(reward) < float("inf"):
        raise EnvironmentFailure(f"{where} returned the reward {quoted(value, SHOWN_CHARS)}, not a finite number")
    return reward
