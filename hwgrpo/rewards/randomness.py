"""Random numbers of reward functions, which depend only on the seed of a call, in any process."""

from __future__ import annotations

import builtins
import hashlib
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Part = int | str | None
Seed = tuple[Part, ...]
"""Parts from which a seed is derived."""
CONCURRENT = "together"
"""Part in the place of a call's number: concurrent calls of an async function share one generator."""


GENERATORS = threading.RLock()
"""Held where a thread changes the state of global generators for a while, or reads it for a checkpoint."""


@contextmanager
def kept_generators() -> Iterator[None]:
    """Give Python's and numpy's global generators back their states, for a thread beside the one that trains."""
    with GENERATORS:
        python, numpy = random.getstate(), _numpy_state()
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                sys.modules["numpy.random"].set_state(numpy)


@contextmanager
def seeded(*parts: Part, with_torch: bool = False) -> Iterator[None]:
    """Seed Python's and numpy's global generators for the block; imports in it do not advance them.

    Modules may draw during import, as rich does. A resumed run imports them in another step than an uninterrupted one,
    so a reward function that imports one before it draws would give other rewards.

    Args:
        parts: parts from which the seed is derived.
        with_torch: whether to seed torch's generator on the host, too, also where the block imports torch.
    """
    seed = seed_of(*parts)
    random.seed(seed)
    _seed_numpy(seed)
    if with_torch:
        _seed_torch(seed)
    plain, thread = builtins.__import__, threading.get_ident()

    def without_draws(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:  # the seeded thread may draw meanwhile: keep the state
            return plain(*args, **kwargs)
        before, numpy_before = random.getstate(), _numpy_state()
        first_torch = with_torch and "torch" not in sys.modules
        try:
            return plain(*args, **kwargs)
        finally:
            random.setstate(before)
            if numpy_before is None:
                _seed_numpy(seed)
            else:
                sys.modules["numpy.random"].set_state(numpy_before)
            if first_torch:
                _seed_torch(seed)

    builtins.__import__ = without_draws
    try:
        yield
    finally:
        builtins.__import__ = plain


def seed_of(*parts: Part) -> int:
    """Return a seed of 64 bits, derived from parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def _seed_numpy(seed: int) -> None:
    """Seed numpy's generator where numpy is loaded: a process that runs a reward without it starts faster."""
    seed_numpy = getattr(sys.modules.get("numpy.random"), "seed", None)  # None while it is being imported
    if seed_numpy is not None:
        seed_numpy(seed % 2**32)


def _seed_torch(seed: int) -> None:
    """Seed torch's generator on the host where torch is loaded."""
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.manual_seed(seed)


def _numpy_state() -> Any:
    get_state = getattr(sys.modules.get("numpy.random"), "get_state", None)
    return None if get_state is None else get_state()
