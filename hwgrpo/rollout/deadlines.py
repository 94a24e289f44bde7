"""Deadlines of groups (`rollout.group_timeout`): a late group is dispatched again once, then dropped."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic

import torch

from hwgrpo.support.waits import LONG_WORK, Wait
from hwgrpo.values import Completions

REPORT_CHECK = 1.0
"""Seconds between checks whether a report is due."""


def late_groups(dispatched: Mapping[int, float], now: float, timeout: float) -> list[int]:
    """Return the groups that were dispatched `timeout` seconds ago or earlier.

    Args:
        dispatched: unfinished group -> time of its last dispatch, in seconds.
        now: time on the same clock.
        timeout: `rollout.group_timeout`.
    """
    return [group for group, time in dispatched.items() if now - time >= timeout]


class GroupDeadlines:
    """Deadlines of the groups of one `generate`. Other threads may call `dispatch`, `finish` and `miss`.

    Args:
        groups: number of groups, 0 <= group < groups.
        timeout: `rollout.group_timeout` in seconds; None: no group is late.
    """

    def __init__(self, groups: int, timeout: float | None) -> None:
        self._groups, self._timeout = groups, timeout
        self._dispatched: dict[int, float] = {}
        self._finished: set[int] = set()
        self._late: set[int] = set()
        self._dropped: set[int] = set()
        self._wait = Wait(
            lambda: f"the responses of {self._groups - len(self._finished)} of {self._groups} groups",
            math.inf,
            first_report=LONG_WORK if timeout is None else timeout,
        )

    def expect(self, groups: int) -> None:
        """Record that so many groups more will be dispatched."""
        self._groups += groups

    def dispatch(self, group: int) -> None:
        """Record that a group is dispatched now, unless it was before."""
        self._dispatched.setdefault(group, monotonic())

    def finish(self, group: int) -> None:
        """Record that a group has all its responses, or is dropped."""
        self._dispatched.pop(group, None)
        self._finished.add(group)

    def miss(self, group: int) -> bool:
        """Record that a group missed its deadline; return whether to dispatch it again, which begins another one."""
        if group in self._late:
            self._dropped.add(group)
            self.finish(group)
            return False
        self._late.add(group)
        self._dispatched[group] = monotonic()
        return True

    def misses(self) -> list[tuple[int, bool]]:
        """Return the groups that have missed their deadlines now, and whether to dispatch each again."""
        if self._timeout is None:
            return []
        return [(group, self.miss(group)) for group in late_groups(self._dispatched, monotonic(), self._timeout)]

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Print how many groups are awaited, from a thread during the block, whenever a report is due."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(REPORT_CHECK):
                if len(self._finished) < self._groups:
                    self._wait.report()

        thread = threading.Thread(target=watch, name="hwgrpo-rollout-wait", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(REPORT_CHECK)

    def overdue(self) -> list[int]:
        """Return the groups that are dropped now, of an engine that decodes a late group on.

        To dispatch it again would not help there: the same seed would give the same tokens.
        """
        return [group for group, again in self.misses() if not again]

    def apply(self, completions: Completions, groups: Sequence[int] | None = None) -> Completions:
        """Return completions without the responses of dropped groups, and with the record of late and dropped ones.

        Args:
            completions: the responses.
            groups: the group of each prompt; None: group i is that of prompt i.
        """
        if self._timeout is None:
            return completions
        reason = f"no responses within rollout.group_timeout={self._timeout:g} s, twice"
        groups = range(self._groups) if groups is None else groups
        dropped = {prompt: reason for prompt, group in enumerate(groups) if group in self._dropped}
        if dropped:
            count = f"{len(dropped)} of {len(groups)} groups"
            print(f"hwgrpo: dropped the responses of {count}: {reason}", file=sys.stderr, flush=True)
            completions = _without(completions, dropped)
        return replace(completions, late=len(self._late.intersection(groups)), dropped=dropped)


def _without(completions: Completions, dropped: Mapping[int, str]) -> Completions:
    """Return completions without the responses to some prompts."""
    wanted = [prompt not in dropped for prompt in completions.prompt_index.tolist()]
    kept = completions.select(torch.tensor(wanted, dtype=torch.bool))
    if kept.versions is None:
        return kept
    if not kept.versions.numel():
        return replace(kept, versions=None)
    return replace(kept, weight_version=int(kept.versions.min()))
