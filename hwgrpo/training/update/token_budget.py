"""The token budget of a micro-batch: halve it and repeat the work when memory runs out.

Losses are normalised by counts of the full update, so its gradient does not depend on the micro-batches. When a pass
runs out of memory, its gradients are discarded, the random state is restored, and the same sequences are computed in
smaller micro-batches. The smaller budget is saved in the run's folder, and the next start of the run uses it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from hwgrpo_backends.device import Device

from hwgrpo.errors import CheckpointError
from hwgrpo.training.strategies.strategy import Strategy

T = TypeVar("T")

FILE = "micro_batch.json"


class TokenBudget:
    """Tokens per micro-batch on each device.

    Args:
        tokens: initial budget.
        least: smallest budget: the length of the longest possible sequence.
        device: this process's device, which recognizes out-of-memory errors; None: never repeat work.
        folder: the run's folder, where a smaller budget is saved; None: do not save it.
    """

    def __init__(
        self, tokens: int, *, least: int = 1, device: Device | None = None, folder: Path | None = None
    ) -> None:
        self.tokens = tokens
        self._least = min(least, tokens)
        self._device = device
        self._file = folder / FILE if folder else None
        self.restarts = 0
        """Number of repetitions since `pop_restarts`."""
        self.notes: list[str] = []
        """Notes for the user; whoever shows them clears them."""
        try:
            smaller = read_saved_budget(folder) if folder else None
        except CheckpointError as error:
            smaller = None
            self.notes.append(f"{error}; trainer.tokens_per_micro_batch is used: {tokens:,}")
        if smaller is not None and smaller < tokens:
            self.tokens = max(smaller, self._least)
            self.notes.append(
                f"memory ran out before at {tokens:,} tokens per micro-batch: now {self.tokens:,} "
                f"(from {self._file}; remove it to use trainer.tokens_per_micro_batch again)"
            )

    def run(self, strategy: Strategy, what: str, work: Callable[[], T], undo: Callable[[], None]) -> T:
        """Run work that is split by this budget; if memory runs out on any rank, repeat it with a smaller one.

        Where the work has collectives (`strategy.has_collectives_in_passes`), the other ranks cannot wait for one that
        fails: the smaller budget is saved for the next start, and the error is raised.

        Args:
            strategy: connects the ranks.
            what: name of the work in notes, e.g. "scoring".
            work: splits by `tokens`, and can be repeated after `undo`.
            undo: discards the work's partial results.

        Raises:
            RuntimeError or MemoryError: memory ran out and the budget cannot be smaller. Other errors propagate.
        """
        alone = strategy.world_size == 1
        while True:
            state = self._random_state()
            error: BaseException | None = None
            result: T | None = None
            try:
                result = work()
            except (RuntimeError, MemoryError) as failure:
                if self._device is None or not self._device.is_oom(failure):
                    raise
                if strategy.has_collectives_in_passes and not alone:
                    self._shrink(strategy.rank, what)
                    raise
                error = failure.with_traceback(None)  # its frames hold the tensors that filled the memory
            failed = error is not None if alone else strategy.sum([error is not None])[0] > 0
            if not failed:
                return result  # type: ignore[return-value]
            del result
            if self.tokens <= self._least:
                raise error or MemoryError(f"another rank has no memory left for {self.tokens} tokens at a time")
            undo()
            self._restore(state)
            self._shrink(strategy.rank, what)
            self.restarts += 1

    def pop_restarts(self) -> int:
        """Return and reset the number of repetitions."""
        count, self.restarts = self.restarts, 0
        return count

    def _shrink(self, rank: int, what: str) -> None:
        before, self.tokens = self.tokens, max(self.tokens // 2, self._least)
        self.notes.append(
            f"out of memory while {what} with {before:,} tokens per micro-batch: repeated with {self.tokens:,}, and "
            "so from here on"
        )
        if self._file is not None:
            partial = self._file.with_name(f".{self._file.name}.{rank}")
            try:
                partial.unlink(missing_ok=True)
                with open(partial, "x", encoding="utf-8") as file:
                    json.dump({"tokens_per_micro_batch": self.tokens, "too_many": before}, file)
                os.replace(partial, self._file)
            except OSError as error:  # the next start runs out of memory once more and recovers
                self.notes.append(f"{self._file} cannot be written: {error.strerror}; a new start finds the size again")

    def _random_state(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self._device is None else (torch.get_rng_state(), self._device.rng_state())

    def _restore(self, state: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        assert state is not None
        assert self._device is not None
        self._device.empty_cache()
        torch.set_rng_state(state[0])
        self._device.set_rng_state(state[1])


def read_saved_budget(folder: Path) -> int | None:
    """Return the smaller budget saved in a run's folder; None if there is none.

    Raises:
        CheckpointError: the file cannot be read, or has other content.
    """
    path = folder / FILE
    try:
        tokens = json.loads(path.read_bytes())["tokens_per_micro_batch"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} contains no micro-batch size; remove it") from error
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        shown = f"{tokens!r}"[:80]
        raise CheckpointError(f"{path} says tokens_per_micro_batch={shown}, which is no number of tokens; remove it")
    return tokens
