"""What a run changes in its process, and its restoration."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from hwgrpo.user_code import MODULE_PREFIX, plugin_modules

if TYPE_CHECKING:
    from hwgrpo_backends.device import Device


class RestoredEnvironment:
    """Restores the environment variables that a run sets, when its block ends.

    Those that change while it is paused are the caller's, and keep their values.
    """

    def __init__(self) -> None:
        self._before: dict[str, str] = {}
        self._paused: dict[str, str] | None = None

    def __enter__(self) -> RestoredEnvironment:
        self._before = dict(os.environ)
        return self

    def pause(self) -> None:
        """Let the caller change variables until `resume`."""
        if self._paused is None:
            self._paused = dict(os.environ)

    def resume(self) -> None:
        """End a pause: what has changed in it is part of the state to be restored."""
        now = dict(os.environ)
        _apply(_changes(now if self._paused is None else self._paused, now), self._before)
        self._paused = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resume()
        _apply(_changes(dict(os.environ), self._before), os.environ)


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that differ with their values now; None: removed."""
    return {name: now.get(name) for name in before.keys() | now.keys() if before.get(name) != now.get(name)}


def _apply(changes: Mapping[str, str | None], environment: MutableMapping[str, str]) -> None:
    for name, value in changes.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value


@contextmanager
def restored_process(device: Device) -> Iterator[None]:
    """Restore everything else that a run changes in its process, after the block.

    These are random generators, torch's threads, determinism and attention kernels, the selection of kernels,
    transformers' progress bars,
    how standard output treats characters that it lacks, and modules of the user's files, which are read again by the
    next run. Plug-ins stay registered, and imported packages stay imported.

    Args:
        device: the run's.
    """
    import torch
    from hwgrpo_kernels import default_registry
    from transformers.utils import logging

    from hwgrpo.support.torch_settings import ATTENTION, SETTINGS
    from hwgrpo.training.checkpoint import rng_state

    generators = rng_state.capture(device)
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    read_attention, set_attention = SETTINGS[ATTENTION]
    attention = read_attention()
    has_bars = logging.is_progress_bar_enabled()
    stdout = sys.stdout
    errors = stdout.errors if isinstance(stdout, io.TextIOWrapper) else None
    modules = set(sys.modules)
    try:
        with default_registry.restored():
            yield
    finally:
        rng_state.restore(generators, device, 0)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        set_attention(attention)
        if has_bars:
            logging.enable_progress_bar()
        if isinstance(stdout, io.TextIOWrapper) and not stdout.closed:
            stdout.reconfigure(errors=errors)
        for name in set(sys.modules) - modules - plugin_modules():
            if name.startswith(MODULE_PREFIX):
                del sys.modules[name]
