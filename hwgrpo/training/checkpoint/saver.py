"""Saves checkpoints while training continues.

At the end of a step every rank copies its share of the state to host memory, and a thread writes the copy. A rank marks
its files as written by a small file; rank 0's thread waits for those of all ranks, writes the manifest, and renames the
folder. So a checkpoint is completed without a collective, even if the run ends with an error meanwhile. The main
threads of all ranks learn of success or failure at the ends of steps.

A checkpoint has no state from within a step (prompts drawn, unfinished responses): a resumed run repeats the next step
from its beginning, with the same prompts and random numbers. Prefetched batches are in the checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from hwgrpo_backends.device import Device

from hwgrpo.errors import RunError
from hwgrpo.support.waits import STUCK_AFTER, wait_for_thread
from hwgrpo.training.checkpoint import checkpoint_files, rng_state, shard_files
from hwgrpo.training.checkpoint.manifest import SCHEMA
from hwgrpo.training.checkpoint.writer import CheckpointWriter
from hwgrpo.training.strategies.param_shard import copy_to_host
from hwgrpo.training.strategies.strategy import Strategy

GRACE_S = 20.0
"""Seconds that an error waits for a checkpoint to complete; launchers kill after about 30 seconds."""


class Saver:
    """Saves a run's checkpoints. Use as a context manager around the loop: an error then waits for an unfinished one.

    All ranks call every method, in the main thread, at the end of a step.

    Args:
        root: folder of the run's checkpoints, shared by all ranks.
        strategy: has parameters and optimizer states; each rank writes a share of them.
        device: this process's device.
        keep: number of checkpoints to keep.
        asynchronous: whether training continues during the write, which costs a copy of this rank's share (fp32
            parameters and two optimizer states) in host memory.
        state: returns the remaining state as JSON values (sampler position, updates done, ...), equal on all ranks.
        extra_files: returns further files of this rank: its prefetched batches.
        note: shows a line to the user.
        folder_moved: returns where the run's folder is if it was moved, else None; called when writing fails.
        timeout: seconds after which a writing thread counts as hanging.
    """

    def __init__(
        self,
        root: Path,
        strategy: Strategy,
        device: Device,
        *,
        keep: int,
        asynchronous: bool,
        state: Callable[[], Mapping[str, Any]],
        extra_files: Callable[[], dict[str, dict[str, torch.Tensor]]],
        note: Callable[[str], None],
        folder_moved: Callable[[], str | None] = lambda: None,
        timeout: float = STUCK_AFTER,
    ) -> None:
        self._root = root
        self._strategy = strategy
        self._device = device
        self._keep = keep
        self._asynchronous = asynchronous
        self._state = state
        self._extra_files = extra_files
        self._note = note
        self._folder_moved = folder_moved
        self._timeout = timeout
        self._save: CheckpointWriter | None = None
        self.last_step: int | None = None
        """Step of the last checkpoint that this start has begun to write."""

    def save(self, step: int, *, last: bool = False) -> None:
        """Start writing a checkpoint, after the previous one is complete.

        Args:
            step: the last finished step.
            last: training has ended, so the checkpoint is complete on return, and nothing is copied.

        Raises:
            RunError: a rank could not write this one or the previous one; raised on all ranks. Earlier checkpoints are
                untouched, and the failed one is removed.
        """
        self.wait()
        self.last_step = step
        self._prepare(step)
        shards = self._strategy.owned_shards()
        rank = self._strategy.rank
        background = self._asynchronous and not last
        if background:
            shards = copy_to_host(shards)
        self._device.synchronize()  # these copies, and those of states that are held on the host
        own = {checkpoint_files.rng_file(rank): rng_state.capture(self._device)} | shard_files.files_of(shards, rank)
        own |= self._extra_files()
        manifest = {
            "schema": SCHEMA,
            "step": step,
            "world_size": self._strategy.world_size,
            "torch": torch.__version__,
            "state": json.loads(json.dumps(self._state())),  # a copy: the run's own may change
        }
        table = shard_files.table_of(shards, rank)
        del shards  # the writer drops what it has written
        self._save = CheckpointWriter(self._root, manifest, own, table, rank, keep=self._keep, timeout=self._timeout)
        if background:
            self._save.begin()
        else:
            self._save.write()
            self.wait()

    def poll(self) -> None:
        """Report a checkpoint that completed or failed since the last call, without waiting.

        Raises:
            RunError: as `save`.
        """
        if self._save is None:
            return
        done, failed = self._strategy.sum([self._save.done, self._save.error is not None])
        if failed or done == self._strategy.world_size:
            self.wait()

    def wait(self) -> None:
        """Wait until the unfinished checkpoint, if there is one, is complete.

        Raises:
            RunError: as `save`.
        """
        save = self._save
        if save is None:
            return
        wait_for_thread(save.written.wait, f"the files of checkpoint {save.step}", self._timeout)
        errors = self._errors(save)
        if not errors:  # else rank 0 would wait for a share that never comes
            save.complete()
            errors = self._errors(save)
        self._save = None
        if errors:
            self._fail(save, errors)
        self._note(f"saved {checkpoint_files.folder_of(self._root, save.step)}")

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        save, self._save = self._save, None
        # No collectives here: the other ranks may be anywhere. A second Ctrl-C does not wait; GeneratorExit is the end
        # of a loop over the steps.
        if save is not None and isinstance(error, Exception | GeneratorExit):
            save.give_time(GRACE_S)

    def _prepare(self, step: int) -> None:
        """Make an empty folder on rank 0."""
        problem = None
        if self._strategy.rank == 0:
            partial = checkpoint_files.partial_of(self._root, step)
            try:
                self._root.mkdir(exist_ok=True)  # without parents: a run's folder that was moved is not recreated
                checkpoint_files.discard(partial)
                partial.mkdir()
            except OSError as error:
                problem = str(error)
        problems = self._strategy.gather_objects(problem)
        if problems[0] is not None:
            raise RunError(self._message(step, problems[0]))

    def _errors(self, save: CheckpointWriter) -> list[str]:
        """Return the errors of all ranks."""
        mine = None if save.error is None else str(save.error) or type(save.error).__name__
        errors = enumerate(self._strategy.gather_objects(mine))
        several = self._strategy.world_size > 1
        return [f"rank {rank}: {error}" if several else error for rank, error in errors if error is not None]

    def _fail(self, save: CheckpointWriter, errors: list[str]) -> NoReturn:
        save.give_up()
        if self._strategy.rank == 0:
            # frees space on a full disk
            shutil.rmtree(checkpoint_files.partial_of(self._root, save.step), ignore_errors=True)
        self._strategy.barrier()
        raise RunError(self._message(save.step, errors[0])) from save.error

    def _message(self, step: int, problem: str) -> str:
        moved = self._folder_moved()
        if moved is not None:
            return f"the checkpoint of step {step} could not be written: {moved}"
        left = checkpoint_files.folders(self._root)
        return (
            f"the checkpoint of step {step} could not be written to {self._root}: {problem}; make room or restore "
            f"access there, then start again: the run resumes from {left[-1][1].name if left else 'the start'}"
        )
