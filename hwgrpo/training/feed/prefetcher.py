"""Prefetched responses: a thread generates them while earlier steps are trained.

Their weights are some versions older than the policy trained on them. The bound `rollout.max_staleness` is checked
twice: the thread starts a batch only once the engine's weights are new enough, and the policy is not trained on a
batch of older weights.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.config.rollout_rules import scores_ahead
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.observe.timing import PREFIX
from hwgrpo.rollout.engine import Engine
from hwgrpo.rollout.pause_gate import Gate, Stopped
from hwgrpo.support.waits import STUCK_AFTER, join_thread, wait_for_thread
from hwgrpo.training.feed import group_files, prefetched_batches
from hwgrpo.training.feed.collector import make_collector
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.feed.response_source import Batch, Collector, PrefetchedBatch, SourceParts
from hwgrpo.training.feed.scored_groups import NO_GROUPS, KeptGroups


def prefetch(parts: SourceParts) -> Prefetcher:
    """Return the source that collects while earlier steps are trained.

    Raises:
        ConfigError: the settings do not allow it; see `check_ahead`.
    """
    gate = parts.gate
    several = parts.strategy.world_size > 1 and scores_ahead(parts.config)
    collector = make_collector(parts, parts.strategy.for_thread(gate.raise_if_stopped) if several else parts.strategy)
    if collector.exchanges:
        check_ahead(parts)
    return Prefetcher(
        collector,
        parts.prompts,
        parts.engine,
        gate,
        parts.device,
        max_staleness=parts.config.rollout.max_staleness,
        first_step=parts.start + 1,
        last_step=parts.total_steps,
        prefetched=parts.prefetched,
        state=parts.state,
        kept=parts.kept,
        timeout=parts.config.trainer.process_group_timeout,
    )


def check_ahead(parts: SourceParts) -> None:
    """Check that the responses of later steps may be scored while a step is trained.

    Raises:
        ConfigError: rewards have state of their own, or training draws random numbers of torch, as rewards may.
    """
    ahead = f"{scores_ahead(parts.config)} with rollout.max_staleness={parts.config.rollout.max_staleness}"
    if parts.rewards.metrics:
        raise ConfigError(
            f"{ahead} scores responses before their step, and these reward functions have state or report counts of a "
            f"step: {', '.join(parts.rewards.metrics.functions)}; leave one of them out"
        )
    if parts.dropout:
        raise ConfigError(
            f"{ahead} scores responses while a step is trained, and both draw torch's random numbers: the model or its "
            "adapter has dropout; set model.lora.dropout=0 or the dropout in the model's config.json to 0, or leave "
            "rollout.max_staleness out"
        )


class Prefetcher:
    """Generates in its own thread, at most `max_staleness` versions behind the policy.

    With a bound of 1 (one-step-off policy) the order is fixed: while a step is trained, the responses of the next are
    sampled, and its new weights wait for them. With a larger bound the thread prefetches as far as the bound allows,
    and the version that samples a batch depends on timing.

    Prefetched batches are part of a checkpoint. The batch in flight is sampled again after a resume: with a bound of 1
    from the same weights, so the resumed run is identical to the last bit.

    Where ranks exchange values while they collect, all of them begin a batch while the training threads are in `next`,
    and new weights wait for its end. So no rank is in the middle of a batch that another has not begun.

    Args:
        collector: collects the batches, in the thread.
        source: the prompts, drawn by the thread.
        engine: generates with a separate copy of the weights; others call it only within `exclusive_engine`.
        gate: gate at which the engine pauses, if it can between tokens.
        device: made current in the thread.
        max_staleness: bound in weight versions, at least 1.
        first_step: first step to be requested.
        last_step: last step to generate for.
        prefetched: existing batches of the first steps; `source` is positioned after them.
        state: position in the data before them; None if there are none.
        kept: groups kept for later steps before them.
        timeout: seconds after which the thread counts as hanging.
    """

    def __init__(
        self,
        collector: Collector,
        source: PromptSource,
        engine: Engine,
        gate: Gate,
        device: Device,
        *,
        max_staleness: int,
        first_step: int,
        last_step: int,
        prefetched: Sequence[PrefetchedBatch] = (),
        state: dict[str, Any] | None = None,
        kept: KeptGroups = NO_GROUPS,
        timeout: float = STUCK_AFTER,
    ) -> None:
        assert max_staleness >= 1
        self._collector, self._source, self._engine, self._gate, self._device = collector, source, engine, gate, device
        self._together = collector.exchanges and source.world_size > 1
        """Whether all ranks begin a batch together."""
        self._max_staleness = max_staleness
        self._bounds = [(0, max_staleness)]
        self._last_step = last_step
        self._timeout = timeout
        self._state, self._kept = state or source.state(), kept
        self._version = first_step - 1
        self._done = deque(prefetched)
        self._begun = first_step + len(prefetched) - 1
        self._awaited = first_step
        """Last step whose batch may be begun where ranks begin together."""
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._generate_all, args=(self._begun + 1,), name="hwgrpo-rollout", daemon=True
        )

    def next(self, step: int) -> Batch:
        if self._thread.ident is None:
            self._thread.start()
        with self._changed:
            self._awaited = step + (self._bound(step + 1) > 0)  # without a bound the next waits for its own `next`
            self._changed.notify_all()
            self._wait_until(lambda: bool(self._done) or self._error is not None, f"the responses of step {step}")
            if not self._done:
                assert self._error is not None
                raise self._error
            prefetched = self._done.popleft()
        batch, self._state, self._kept = prefetched.batch, prefetched.state, prefetched.kept
        policy = step - 1
        if self._too_old(batch, policy) and self._source.world_size == 1:
            with self.exclusive_engine():  # an engine lost its weights, or a server restarted with older ones
                self._engine.update_weights(policy)
                batch = self._collector.resample(step, batch) or batch
        if self._too_old(batch, policy):  # sending weights needs all ranks, but only this one has noticed
            raise RunError(
                f"the responses of step {step} were sampled with weights {batch.versions[0]}, but the "
                f"policy has weights {policy} and rollout.max_staleness={self._max_staleness}: the rollout engine does "
                "not apply new weights; start again from the newest checkpoint"
            )
        # The next batch must be in flight before this step trains: otherwise this step's weights could come first.
        wanted = min(step + 1, self._last_step)
        with self._changed:
            if self._bound(step + 1) == 0:  # it waits for this step's weights
                wanted = step
            self._wait_until(
                lambda: self._begun >= wanted or self._error is not None, f"the rollout thread to begin step {wanted}"
            )
        age = [policy - version for version in batch.versions]
        staleness = {"rollout/staleness_max": float(age[0]), "rollout/staleness_min": float(age[1])}
        metrics = {name: value for name, value in batch.metrics.items() if not name.startswith(PREFIX)}
        return replace(batch, metrics=metrics | staleness)  # its times are not this step's

    def limit_staleness(self, bound: int, first_step: int) -> None:
        """Sample the batches of steps from `first_step` on with weights at most `bound` versions old.

        With 0 they are not prefetched. Batches that were begun before stay as they are.
        """
        with self._changed:
            self._bounds.append((first_step, min(bound, self._max_staleness)))
            self._changed.notify_all()

    def update_weights(self, version: int) -> None:
        if self._together and self._error is not None:  # the others' threads wait for this one's
            raise self._error
        with self._gate.held(finish_batch=self._together):
            self._engine.update_weights(version)
        with self._changed:
            self._version = version
            self._changed.notify_all()

    @contextmanager
    def exclusive_engine(self) -> Iterator[None]:
        with self._gate.held(finish_batch=True):
            yield

    def state(self) -> dict[str, Any]:
        return self._state

    def files(self) -> dict[str, dict[str, torch.Tensor]]:
        with self._changed:
            batches = prefetched_batches.files_of(self._done, self._source.rank)
        return batches | group_files.files_of(self._kept, self._source.rank)

    def close(self) -> None:
        self._gate.stop()
        with self._changed:
            self._error = self._error or Stopped()
            self._done.clear()
            self._changed.notify_all()
        if self._thread.ident is not None:
            join_thread(self._thread, "the rollout thread to end", self._timeout)

    def _generate_all(self, first_step: int) -> None:
        try:
            self._device.set_device()
            for step in range(first_step, self._last_step + 1):
                # the policy to be trained on it is version step - 1
                self._wait(lambda step=step: self._may_begin(step))
                with self._gate.inside():
                    with self._changed:
                        self._begun = step
                        self._changed.notify_all()
                    batch = self._collector.collect(step)
                    prefetched = PrefetchedBatch(batch, self._source.state(), self._collector.kept)
                    with self._changed:  # before new weights may come, so that a checkpoint with them has the batch
                        if self._error is None:
                            self._done.append(prefetched)
                            self._changed.notify_all()
        except BaseException as error:  # `next` raises it in the caller's thread
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _may_begin(self, step: int) -> bool:
        if self._together and step > self._awaited:
            return False
        return self._version >= step - 1 - self._bound(step)

    def _bound(self, step: int) -> int:
        return next(bound for first_step, bound in reversed(self._bounds) if step >= first_step)

    def _too_old(self, batch: Batch, policy: int) -> bool:
        return policy - batch.versions[0] > self._max_staleness

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._wait_until(lambda: ready() or self._error is not None, "the update of the policy")
            if self._error is not None:
                raise Stopped

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        wait_for_thread(lambda seconds: self._changed.wait_for(ready, seconds), what, self._timeout)
