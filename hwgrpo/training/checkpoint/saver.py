"""Writing checkpoints while the training goes on.

At the end of a step every rank copies its share of the state to host memory, and a thread of its own writes the copy.
A rank that is done says so by a small file; rank 0's thread waits for those of all ranks, writes the manifest, and
gives the folder its name. So a checkpoint gets whole without a collective, even when the run ends by an error
meanwhile. Whether it did is told to all ranks at the ends of steps, in their main threads.

What is under way within a step (prompts drawn, responses half done) is not in a checkpoint: a run that goes on from it
repeats the step after it from that step's beginning, with the same prompts and the same random numbers. Batches that
were sampled ahead are in it.
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
from hwgrpo.training.checkpoint import checkpoint_files, rng_state, shard_files
from hwgrpo.training.checkpoint.manifest import SCHEMA
from hwgrpo.training.checkpoint.writer import CheckpointWriter
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.waits import STUCK_AFTER, wait_for_thread

GRACE_S = 20.0
"""How long an error waits for a checkpoint to get whole; launchers kill after about 30 seconds."""


class Saver:
    """Writes a run's checkpoints. Use as a context manager around the loop: an error then waits for the one under way.

    All methods are to be called by all ranks, in the main thread, at the end of a step.

    Args:
        root: folder of the run's checkpoints, which all ranks see.
        strategy: holds parameters and moments; each rank writes a part of them.
        device: of this process.
        keep: how many checkpoints stay.
        asynchronous: whether the training goes on meanwhile, at the price of a copy of this rank's share (fp32
            parameters and two moments) in host memory.
        state: returns the JSON-able rest (sampler position, updates done, ...), equal on all ranks.
        batches: returns what this rank has sampled ahead and not handed out.
        tell: takes a line for the user.
        moved: returns what became of the run's folder where it is no longer at its path; asked where writing fails.
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
        tell: Callable[[str], None],
        moved: Callable[[], str | None] = lambda: None,
        timeout: float = STUCK_AFTER,
    ) -> None:
        self._root = root
        self._strategy = strategy
        self._device = device
        self._keep = keep
        self._asynchronous = asynchronous
        self._state = state
        self._extra_files = extra_files
        self._tell = tell
        self._moved = moved
        self._timeout = timeout
        self._save: CheckpointWriter | None = None

    def save(self, step: int, *, last: bool = False) -> None:
        """Begin a checkpoint, once the one before is whole.

        Args:
            step: the last finished step.
            last: nothing is trained after it, so it is whole when this returns, and nothing is copied.

        Raises:
            RunError: a rank could not write this one or the one before, told on all of them. Earlier checkpoints are
                as they were, and nothing is left of the one that failed.
        """
        self.wait()
        self._prepare(step)
        shards = self._strategy.owned_shards()
        rank = self._strategy.rank
        own = {checkpoint_files.rng_file(rank): rng_state.capture(self._device)} | shard_files.files_of(shards, rank)
        background = self._asynchronous and not last
        if background:
            own = {name: {key: _copied(t) for key, t in tensors.items()} for name, tensors in own.items()}
            self._device.synchronize()
        own |= self._extra_files()
        manifest = {
            "schema": SCHEMA,
            "step": step,
            "world_size": self._strategy.world_size,
            "torch": torch.__version__,
            "state": json.loads(json.dumps(self._state())),  # a copy: the run's own may change meanwhile
        }
        table = shard_files.table_of(shards, rank)
        self._save = CheckpointWriter(self._root, manifest, own, table, rank, keep=self._keep, timeout=self._timeout)
        if background:
            self._save.begin()
        else:
            self._save.write()
            self.wait()

    def poll(self) -> None:
        """Tell of a checkpoint that has got whole or has failed since the last call; wait for none.

        Raises:
            RunError: as `save`.
        """
        if self._save is None:
            return
        done, failed = self._strategy.sum([self._save.done, self._save.error is not None])
        if failed or done == self._strategy.world_size:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint under way, if there is one, is whole.

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
        self._tell(f"saved {checkpoint_files.folder_of(self._root, save.step)}")

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        save, self._save = self._save, None
        # No rank knows here what the others do, so nothing is said or asked. A second Ctrl-C waits for nothing.
        if save is not None and isinstance(error, Exception):
            save.give_time(GRACE_S)

    def _prepare(self, step: int) -> None:
        """Make an empty folder on rank 0."""
        problem = None
        if self._strategy.rank == 0:
            partial = checkpoint_files.partial_of(self._root, step)
            try:
                self._root.mkdir(exist_ok=True)  # without its parents: a run's folder that was moved is not made anew
                checkpoint_files.discard(partial)
                partial.mkdir()
            except OSError as error:
                problem = str(error)
        problems = self._strategy.gather_objects(problem)
        if problems[0] is not None:
            raise RunError(self._message(step, problems[0]))

    def _errors(self, save: CheckpointWriter) -> list[str]:
        """Return what went wrong on any rank."""
        mine = None if save.error is None else str(save.error) or type(save.error).__name__
        told = enumerate(self._strategy.gather_objects(mine))
        several = self._strategy.world_size > 1
        return [f"rank {rank}: {problem}" if several else problem for rank, problem in told if problem is not None]

    def _fail(self, save: CheckpointWriter, errors: list[str]) -> NoReturn:
        save.give_up()
        if self._strategy.rank == 0:
            # a full disk gets its room back
            shutil.rmtree(checkpoint_files.partial_of(self._root, save.step), ignore_errors=True)
        self._strategy.barrier()
        raise RunError(self._message(save.step, errors[0])) from save.error

    def _message(self, step: int, problem: str) -> str:
        moved = self._moved()
        if moved is not None:
            return f"the checkpoint of step {step} could not be written: {moved}"
        left = checkpoint_files.folders(self._root)
        return (
            f"the checkpoint of step {step} could not be written to {self._root}: {problem}; make room or restore "
            f"access there, then start again: the run resumes from {left[-1][1].name if left else 'the start'}"
        )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory; that of a device's tensor is there after the next synchronization."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    # Page-locked memory, into which a device copies by itself and several times as fast.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
