"""A registered reward in one process, which is killed where a call takes too long: for computations without a limit."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from hwgrpo.rewards.failures import ProcessDied, Raised, TimedOut
from hwgrpo.rewards.processes.worker_pool import Pool


class LimitedReward:
    """One process that serves calls of all threads, one at a time: an interpreter that does not run the user's script.

    Args:
        name: of the reward, in verl's form.
        kwargs: its arguments besides the response and the ground truth.
        plugins: modules that are imported before the time counts.
        seconds: upper bound on a call.
    """

    def __init__(self, name: str, kwargs: Mapping[str, Any], plugins: Sequence[str], seconds: float) -> None:
        self._setup = {"reward": name, "name": name, "key": f"reward {name}", "kwargs": dict(kwargs), "context": {}}
        self._setup |= {"folder": os.getcwd(), "plugins": tuple(plugins)}
        self._seconds, self._lock = seconds, threading.Lock()
        self._pool: Pool | None = None

    def call(self, solution: str, truth: str) -> float | None:
        """Return the reward; None where the call took too long or ended its process.

        Raises:
            ValueError: the reward raised one.
            ConfigError: the reward cannot be called here.
        """
        with self._lock:
            if self._pool is None:
                self._pool = Pool(self._setup, 1, self._seconds)
            (result,) = self._pool.run([{"solution_str": solution, "ground_truth": truth}], 0, None, ())
        if isinstance(result, TimedOut | ProcessDied):  # in a computation that no signal interrupts
            return None
        if isinstance(result, Raised) and result.kind == "ValueError":
            raise ValueError(result.text)
        if isinstance(result, Exception):
            raise result
        return result["value"]
