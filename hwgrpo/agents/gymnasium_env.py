"""The environment `gymnasium`: a `gymnasium.Env` whose observations are read, and actions written, as text."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hwgrpo.agents.action import Action, StepResult, ToolResult
from hwgrpo.errors import ConfigError, error_text, quoted, shown
from hwgrpo.user_code import load_function, names_a_file

INSTALL = 'pip install "hwgrpo[gymnasium]"'
MOST_CHARS = 4096
"""Longest observation: what has more is an image, say, which no model reads as numbers."""
MOST_LETTERS = 128
"""Characters of a Text space that the prompt names."""
_LOADING = threading.Lock()
"""Held while a file is loaded: instances are made in threads, and none must see a module that is half there."""


class ActionText(Protocol):
    """Reads the actions of a space."""

    expected: str
    """What an action looks like, for the model."""

    def read(self, text: str) -> Any:
        """Return the action that a text names.

        Raises:
            ValueError: it names none.
        """
        ...


class GymnasiumEnvironment:
    """A `gymnasium.Env` for a policy that reads and writes text.

    Observations: text stays as it is; numbers, arrays, tuples and dicts are JSON. Actions: the text itself in a Text
    space; the number or a name in a Discrete one. A turn that is no action is answered with what is expected, and
    changes nothing in the environment; `rollout.agent.max_turns` bounds such turns.
    The same row begins the same episode, whose transitions are drawn alike for the same actions, where the environment
    draws from its `np_random`.

    Args:
        id: id of a registered environment, `module:id` of one that a module registers, or `path/to/file.py:Class`.
        arguments: arguments of the environment.
        actions: names of the actions of a Discrete space, in their order; None: they are numbers.
        pattern: regular expression, of whose last match in a turn the first group, or the whole, is the action; None:
            all of the turn.
        expected: what the model reads of a turn that is no action, after "Not an action: write "; None: made from the
            action space.
        malformed_reward: reward of such a turn.
        seed_key: column with the seed, a whole number; None: a digest of the row's columns.
        options_key: column with the options of `reset`; None: it gets none.
        digits: significant digits of numbers that are not whole.

    Raises:
        ConfigError: the package is missing, there is no such environment, or its actions are neither text nor Discrete.
    """

    def __init__(
        self,
        id: str,
        arguments: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        pattern: str | None = None,
        expected: str | None = None,
        malformed_reward: float = 0.0,
        seed_key: str | None = None,
        options_key: str | None = None,
        digits: int = 4,
    ) -> None:
        self._env = make_environment(id, dict(arguments or {}))
        self._actions = action_text(self._env.action_space, actions, id)
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"kwargs.pattern={pattern!r} is no regular expression: {error}") from error
        self._expected = self._actions.expected if expected is None else expected
        self._malformed_reward, self._digits = malformed_reward, digits
        self._seed_key, self._options_key = seed_key, options_key
        self._seen = ""

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin an episode; return its first observation."""
        options = None if self._options_key is None else row[self._options_key]
        observation, _ = self._env.reset(seed=self._seed(row), options=options)
        return self._text(observation)

    def step(self, action: Action) -> StepResult:
        """Act as a turn says; a turn that is no action is answered with what is expected."""
        started = time.monotonic()
        try:
            value = self._actions.read(self._action_in(action.content))
        except ValueError:
            text = f"Not an action: write {self._expected}."
            result = ToolResult(text, "malformed", time.monotonic() - started)
            return StepResult(text, self._malformed_reward, results=(("action", result),))
        observation, reward, terminated, truncated, _ = self._env.step(value)
        text = self._text(observation)
        result = ToolResult(text, seconds=time.monotonic() - started)
        return StepResult(text, float(reward), bool(terminated or truncated), (("action", result),))

    def state(self) -> str:
        """Return the newest observation."""
        return self._seen

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _seed(self, row: Mapping[str, Any]) -> int:
        if self._seed_key is None:
            content = json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__)
            return int.from_bytes(hashlib.sha256(content.encode()).digest()[:4], "big")
        seed = row.get(self._seed_key)
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"the column {self._seed_key} (kwargs.seed_key) is {quoted(seed)}, no whole number >= 0")
        return seed

    def _action_in(self, text: str) -> str:
        """Return the part of a turn that is the action.

        Raises:
            ValueError: it has none.
        """
        if self._pattern is None:
            return text.strip()
        found = [*self._pattern.finditer(text)]
        if not found:
            raise ValueError(text)
        return (found[-1][1 if self._pattern.groups else 0] or "").strip()

    def _text(self, observation: Any) -> str:
        """Return an observation as text, and keep it as the state."""
        plain = as_json(observation, self._digits)
        self._seen = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
        if len(self._seen) > MOST_CHARS:
            raise ValueError(
                f"an observation has {len(self._seen)} characters, more than {MOST_CHARS}: wrap the environment so "
                "that it returns text (gymnasium.ObservationWrapper)"
            )
        return self._seen


class _NamedActions:
    """Actions of a Discrete space, as names or numbers."""

    def __init__(self, space: Any, names: Sequence[str] | None) -> None:
        self._numbers = range(int(space.start), int(space.start) + int(space.n))
        self._names = {name.casefold(): number for name, number in zip(names or (), self._numbers)}
        numbers = f"a whole number from {self._numbers[0]} to {self._numbers[-1]}"
        self.expected = numbers if names is None else f"one of {', '.join(names)}"

    def read(self, text: str) -> int:
        named = self._names.get(text.casefold())
        number = int(text) if named is None else named
        if number not in self._numbers:
            raise ValueError(text)
        return number


class _TextActions:
    """Actions of a Text space."""

    def __init__(self, space: Any) -> None:
        self._space = space
        least, most = space.min_length, space.max_length
        length = f"{most}" if least == most else f"{least} to {most}"
        letters = "".join(sorted(space.character_set))
        self.expected = f"text of {length} characters, each one of {letters[:MOST_LETTERS]}"

    def read(self, text: str) -> str:
        if not self._space.contains(text):
            raise ValueError(text)
        return text


def make_environment(id: str, arguments: dict[str, Any]) -> Any:
    """Return the environment of an id, or of a class in a file.

    Args:
        id: as of `GymnasiumEnvironment`.
        arguments: of the environment.

    Raises:
        ConfigError: the package is missing, or the environment cannot be made.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"kwargs.id={shown(id)} needs the package gymnasium ({error_text(error)}): {INSTALL}"
        ) from error
    try:
        with _LOADING:
            loaded = load_function(id, "kwargs.id") if names_a_file(id) else None
        made = gymnasium.make(id, **arguments) if loaded is None else loaded(**arguments)
    except ConfigError:
        raise
    except Exception as error:  # of the package's, and of the environment's
        raise ConfigError(f"kwargs.id={shown(id)}: {type(error).__name__}: {error_text(error)}") from error
    if not isinstance(made, gymnasium.Env):
        raise ConfigError(f"kwargs.id={shown(id)} is no gymnasium.Env; name it in rollout.agent.environments itself")
    return made


def action_text(space: Any, names: Sequence[str] | None, id: str) -> ActionText:
    """Return what reads the actions of a space.

    Args:
        space: the environment's `action_space`.
        names: of the actions of a Discrete space; None: they are numbers.
        id: of the environment, for messages.

    Raises:
        ConfigError: actions of the space cannot be written, or the names do not fit it.
    """
    from gymnasium.spaces import Discrete, Text

    if isinstance(space, Text) and names is None:
        return _TextActions(space)
    if not isinstance(space, Discrete):
        problem = "has names (kwargs.actions) of Discrete actions only" if names is not None else "cannot be written"
        raise ConfigError(
            f"kwargs.id={shown(id)}: the action space {space} {problem}; a policy writes Text or Discrete actions: "
            "wrap the environment (gymnasium.ActionWrapper)"
        )
    if names is not None:
        distinct = {str(name).casefold() for name in names}
        if len(names) != space.n or len(distinct) != len(names) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"kwargs.actions={shown(names)} must be {space.n} different texts, one for each action")
    return _NamedActions(space, names)


def as_json(value: Any, digits: int) -> Any:
    """Return an observation as JSON has it.

    Args:
        value: text, a number, an array, or tuples, lists and dicts of them.
        digits: significant digits of numbers that are not whole.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_json(each, digits) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [as_json(each, digits) for each in value]
    raise TypeError(f"an observation of the type {type(value).__name__} has no text: wrap the environment")
