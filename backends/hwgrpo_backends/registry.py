"""The known backends: the four built-in ones and those of other distributions, loaded when first needed."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from hwgrpo_backends.backend import Backend, BackendError

GROUP = "hwgrpo.backends"
BUILTIN = ("cpu", "cuda", "npu", "rocm")

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """Every backend that could be loaded, and why the others could not."""

    backends: Mapping[str, Backend]
    problems: Mapping[str, str]


def names() -> tuple[str, ...]:
    """Return the name of every backend, sorted; loads none of them.

    Raises:
        BackendError: two distributions offer the same name.
    """
    return tuple(sorted((*BUILTIN, *_plugins(tuple(sys.path)))))


def get(name: str) -> Backend:
    """Return the backend called `name`.

    Raises:
        BackendError: it does not exist or, being a plug-in, fails to load.
    """
    loaded = load_all()
    if name in loaded.problems:
        raise BackendError(f"backend {name!r} cannot be used: {loaded.problems[name]}")
    if name not in loaded.backends:
        raise BackendError(f"backend {name!r} is not known; choose one of: {', '.join(names())}")
    return loaded.backends[name]


def load_all() -> Loaded:
    """Load every backend. A plug-in that fails is logged with its traceback, once, and kept as a problem.

    Raises:
        BackendError: two distributions offer the same name.
    """
    return _load_all(tuple(sys.path))


@cache
def _load_all(path: tuple[str, ...]) -> Loaded:
    backends = {name: importlib.import_module(f"hwgrpo_backends.{name}").BACKEND for name in BUILTIN}
    problems: dict[str, str] = {}
    for name, entry in sorted(_plugins(path).items()):
        try:
            backend = entry.load()
        except Exception as error:
            problems[name] = f"plug-in {entry.value} ({_origin(entry)}) does not load: {type(error).__name__}: {error}"
            logger.warning("backend %r: %s", name, problems[name], exc_info=True)
            continue
        if isinstance(backend, Backend) and backend.name == name:
            backends[name] = backend
            continue
        found = f"a Backend named {backend.name!r}" if isinstance(backend, Backend) else f"a {type(backend).__name__}"
        problems[name] = f"plug-in {entry.value} ({_origin(entry)}) is {found}, not a Backend named {name!r}"
        logger.warning("backend %r: %s", name, problems[name])
    return Loaded(backends, problems)


@cache
def _plugins(path: tuple[str, ...]) -> dict[str, importlib.metadata.EntryPoint]:
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name in BUILTIN:
            raise BackendError(f"{_origin(entry)} offers a backend named {entry.name!r}, which is built in: rename it")
        other = found.get(entry.name)
        if other and (other.value, _origin(other)) != (entry.value, _origin(entry)):
            raise BackendError(
                f"{_origin(other)} ({other.value}) and {_origin(entry)} ({entry.value}) both offer a backend named "
                f"{entry.name!r}: uninstall one of them"
            )
        found[entry.name] = entry
    return found


def _origin(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist else "unknown distribution"
