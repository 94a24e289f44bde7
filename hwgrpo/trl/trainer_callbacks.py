"""Calls of transformers' callbacks with the state and control of a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from hwgrpo.errors import ConfigError
from hwgrpo.trl.grpo_config import note


class RichProgressCallback(TrainerCallback):
    """TRL's callback of a progress display, without effect: the run prints its progress."""

    def __init__(self) -> None:
        note("RichProgressCallback has no effect: the run prints its progress")


class Callbacks:
    """The callbacks of a trainer, called in their order.

    Args:
        callbacks: objects or classes of TrainerCallback.
        args: the trainer's arguments.
        state: its state.
        objects: returns what callbacks get by name, such as model and processing_class.

    Raises:
        ConfigError: one is no TrainerCallback.
    """

    def __init__(
        self,
        callbacks: Sequence[Any] | None,
        args: Any,
        state: TrainerState,
        objects: Callable[[], dict[str, Any]],
    ) -> None:
        self.callbacks: list[TrainerCallback] = []
        self.control = TrainerControl()
        self._args, self._state, self._objects = args, state, objects
        if not isinstance(callbacks, Sequence | None):
            raise ConfigError(f"callbacks={type(callbacks).__name__} is no list; give callbacks=[...]")
        for callback in callbacks or []:
            self.add_callback(callback)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or an object of a class of callbacks."""
        made = callback() if inspect.isclass(callback) else callback
        if not isinstance(made, TrainerCallback):
            raise ConfigError(f"callbacks: {type(made).__name__} is no transformers.TrainerCallback")
        self.callbacks.append(made)

    def pop_callback(self, callback: Any) -> TrainerCallback | None:
        """Remove a callback, or the first one of a class, and return it."""
        for each in self.callbacks:
            if each is callback or (inspect.isclass(callback) and isinstance(each, callback)):
                self.callbacks.remove(each)
                return each
        return None

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class."""
        self.pop_callback(callback)

    @property
    def callback_list(self) -> str:
        """Return the classes of the callbacks, a line each."""
        return "\n".join(type(each).__name__ for each in self.callbacks)

    def overrides(self, event: str) -> bool:
        """Return whether a callback has an event of its own."""
        return any(getattr(type(each), event) is not getattr(TrainerCallback, event) for each in self.callbacks)

    def call(self, event: str, **given: Any) -> TrainerControl:
        """Call an event of all callbacks; return the control as they leave it.

        Args:
            event: e.g. `on_step_end`.
            **given: further arguments, e.g. `logs`.
        """
        if not self.callbacks:
            return self.control
        objects = self._objects()
        for callback in self.callbacks:
            result = getattr(callback, event)(self._args, self._state, self.control, **objects, **given)
            if result is not None:
                self.control = result
        return self.control
