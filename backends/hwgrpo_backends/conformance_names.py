"""Conformance of the names that a backend prefers: each must exist in the package that gives it its meaning.

Those packages are imported by name when they are asked: this one depends on neither of them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from types import ModuleType

from hwgrpo_backends.backend import Backend


def check_names(backend: Backend) -> str:
    """Look up every preference; return which were looked up, and why others were not.

    Raises:
        AssertionError: a name does not exist, or cannot run on this type of device.
    """
    checks = {"hwgrpo_kernels": (_check_kernels, _check_modules), "hwgrpo": (_check_attention, _check_rollout)}
    done, missing = [], []
    for package, steps in checks.items():
        names = [step.__name__.removeprefix("_check_") for step in steps]
        if importlib.util.find_spec(package) is None:
            missing.append(f"{', '.join(names)} not looked up: {package} is not installed")
            continue
        for step in steps:
            step(backend)
        done += names
    return "names: " + "; ".join([", ".join(done), *missing] if done else missing)


def _check_kernels(backend: Backend) -> None:
    registry = _module("hwgrpo_kernels.registry").default_registry
    known = [each for op in registry.ops() for each in registry.implementations(op.name)]
    for name in backend.kernels:
        named = [each for each in known if each.name == name]
        assert named, f"kernels has {name!r}, which is not registered: use {_words(each.name for each in known)}"
        device_type = backend.device_type
        assert any(each.is_for(device_type) for each in named), (
            f"kernels has {name!r}, which has no implementation for {device_type}: take it out, or register one"
        )


def _check_modules(backend: Backend) -> None:
    if not backend.modules:
        return
    known = _module("hwgrpo_kernels.fused_modules").modules(backend.device_type)
    for name in backend.modules:
        assert name in known, f"modules has {name!r}, which {backend.device_type} does not have: use {_words(known)}"


def _check_attention(backend: Backend) -> None:
    attention = _module("hwgrpo.models.attention")
    for name in backend.attention:
        known = attention.is_known(name, backend)
        assert known, f"attention has {name!r}, which hwgrpo does not know: use 'sdpa', 'eager' or a name of its list"


def _check_rollout(backend: Backend) -> None:
    engines = _module("hwgrpo.rollout").ENGINES
    for name in backend.rollout:
        assert name in engines, f"rollout has {name!r}, which hwgrpo does not know: use {_words(engines.names())}"


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _words(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or "none"
