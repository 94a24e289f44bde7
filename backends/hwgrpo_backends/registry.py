"""The known backends: the four built-in ones and those of other distributions, loaded when first needed."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from hwgrpo_backends import entry_points
from hwgrpo_backends.backend import Backend, BackendError, EnvVar
from hwgrpo_backends.entry_points import EntryPoint
from hwgrpo_backends.peaks import Chip

GROUP = "hwgrpo.backends"
BUILTIN = ("cpu", "cuda", "npu", "rocm")
RESERVED = (*BUILTIN, "auto")

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """Every backend that could be loaded, and why the others could not."""

    backends: Mapping[str, Backend]
    problems: Mapping[str, str]


def names() -> tuple[str, ...]:
    """Return the name of every backend, sorted; loads none of them."""
    return tuple(sorted({*BUILTIN, *_offers(tuple(sys.path)).by_name}))


def get(name: str) -> Backend:
    """Return the backend called `name`.

    Raises:
        BackendError: it does not exist or, being a plug-in, cannot be used.
    """
    loaded = load_all()
    if name in loaded.problems:
        raise BackendError(f"backend {name!r} cannot be used: {loaded.problems[name]}")
    if name not in loaded.backends:
        raise BackendError(f"backend {name!r} is not known; choose one of: {', '.join(names())}")
    return loaded.backends[name]


def load_all() -> Loaded:
    """Load every backend. A plug-in that fails is logged with its traceback, once, and kept as a problem."""
    return _load_all(tuple(sys.path))


@cache
def _load_all(path: tuple[str, ...]) -> Loaded:
    backends = {name: importlib.import_module(f"hwgrpo_backends.{name}").BACKEND for name in BUILTIN}
    offers = _offers(path)
    problems = dict(offers.taken)
    for name, entries in sorted(offers.by_name.items()):
        entry, *others = entries
        if others:
            both = " and ".join(f"{entry.owner} ({entry.value})" for entry in entries)
            problems[name] = f"{both} both offer a backend named {name!r}: uninstall one of them"
            continue
        try:
            backend = entry.load()
            problem = _misfit(backend, name)
        except (Exception, SystemExit) as error:  # one vendor's mistake must not take the other backends away
            problem = f"does not load: {type(error).__name__}: {error}"
            logger.warning("backend %r: plug-in %s %s", name, entry.value, problem, exc_info=True)
        else:
            if problem is None:
                backends[name] = _with_checked_functions(backend)
                continue
        problems[name] = f"plug-in {entry.value} ({entry.owner}) {problem}"
    for name, problem in problems.items():
        if "does not load" not in problem:  # that was logged with its traceback
            logger.warning("backend %r: %s", name, problem)
    return Loaded(backends, problems)


class _Offers(NamedTuple):
    """Entry points of `GROUP`: those of each name, and why others cannot have the name that they ask for."""

    by_name: Mapping[str, tuple[EntryPoint, ...]]
    taken: Mapping[str, str]


@cache
def _offers(path: tuple[str, ...]) -> _Offers:
    by_name: dict[str, tuple[EntryPoint, ...]] = {}
    taken = {}
    for entry in entry_points.find(path, (GROUP,)).entries:
        if entry.name in RESERVED:
            what = "is built in" if entry.name in BUILTIN else "means: choose for me"
            problem = f"{entry.owner} ({entry.value}) offers a backend named {entry.name!r}, which {what}: rename it"
            taken[f"{entry.name} ({entry.owner})"] = problem
            continue
        known = by_name.get(entry.name, ())
        # A distribution found twice, installed and as a checkout, has the same entry points.
        if all((other.value, other.owner) != (entry.value, entry.owner) for other in known):
            by_name[entry.name] = (*known, entry)
    return _Offers(by_name, taken)


def _misfit(backend: Any, name: str) -> str | None:
    """Return why the target of an entry point is not the backend `name`, or None."""
    if not isinstance(backend, Backend):
        return f"is a {type(backend).__name__}, not a Backend named {name!r}"
    if backend.name != name:
        return f"is a Backend named {backend.name!r}, not a Backend named {name!r}"
    for field, what, fits in FIELDS:
        if not fits(value := getattr(backend, field)):
            return f"has {field}={value!r}, which is not {what}"
    return None


def _with_checked_functions(backend: Backend) -> Backend:
    """Return a plug-in's backend whose functions name it when they fail, wherever they are called."""

    def arch(index: int) -> str:
        return ask("arch", backend.arch, index, "a word", lambda found: isinstance(found, str) and found != "")

    def compute_dtypes(index: int) -> Any:
        def fits(found: Any) -> bool:
            import torch

            return isinstance(found, tuple) and found != () and all(isinstance(each, torch.dtype) for each in found)

        return ask("compute_dtypes", backend.compute_dtypes, index, "a tuple of dtypes", fits)

    def ask(name: str, function: Callable[[int], Any], index: int, what: str, fits: Callable[[Any], bool]) -> Any:
        try:
            found = function(index)
        except Exception as error:
            failure = f"its {name}({index}) raised {type(error).__name__}: {error}"
            raise BackendError(f"backend {backend.name!r} cannot be used: {failure}") from error
        if not fits(found):
            raise BackendError(f"backend {backend.name!r} cannot be used: its {name}({index}) is {found!r}, not {what}")
        return found

    return dataclasses.replace(backend, arch=arch, compute_dtypes=compute_dtypes)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_text, value))


def _is_profile(value: Any) -> bool:
    if not isinstance(value, Mapping) or not all(map(_is_text, value)):
        return False
    return all(isinstance(each, EnvVar) and isinstance(each.value, str) for each in value.values())


def _is_lists(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_text(name) and _is_texts(each) for name, each in value.items())


def _is_patterns(value: Any) -> bool:
    if not isinstance(value, Mapping) or not all(_is_text(each) for pair in value.items() for each in pair):
        return False
    try:
        return all(re.compile(pattern) for pattern in value)
    except re.error:
        return False


FIELDS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    *((name, "a text", _is_text) for name in ("device_type", "comm", "torch_build")),
    *((name, "a text or None", lambda value: value is None or _is_text(value)) for name in ("plugin", "visible_env")),
    *((name, "a tuple of texts", _is_texts) for name in ("filters", "conflicts", "device_nodes", "packages")),
    *((name, "a tuple of texts", _is_texts) for name in ("companion_nodes", "driver_files", "wsl_files")),
    *((name, "a tuple of texts", _is_texts) for name in ("kernels", "attention", "modules", "rollout")),
    ("attention_archs", "a mapping of texts to tuples of texts", _is_lists),
    *((n, "a mapping of names to EnvVar", _is_profile) for n in ("env_train", "env_rollout", "env_deterministic")),
    ("env_optional", "a mapping of names to EnvVar", _is_profile),
    ("out_of_memory", "a mapping of patterns to texts", _is_patterns),
    ("chips", "a tuple of Chip", lambda value: isinstance(value, tuple) and all(isinstance(c, Chip) for c in value)),
    ("graphs_by_default", "true or false", lambda value: isinstance(value, bool)),
    *((name, "a function", callable) for name in ("probe", "arch", "compute_dtypes")),
    *((name, "a function or None", lambda value: value is None or callable(value)) for name in ("mark", "record")),
)
"""Field of a plug-in's backend, its required kind, and a check of it."""
