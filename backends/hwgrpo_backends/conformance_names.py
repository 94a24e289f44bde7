"""Conformance of the names that a backend prefers: each must exist in the package that gives it its meaning.

Those packages are imported by name when needed: this one depends on neither of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from hwgrpo_backends.backend import Backend


def check_names(backend: Backend) -> str:
    """Look up every preference; return which were looked up, and why others could not be.

    Raises:
        AssertionError: a name does not exist, or cannot run on this type of device.
    """
    done, missing = [], []
    for field, check in CHECKS.items():
        try:
            check(backend)
            done.append(field)
        except ImportError as error:
            missing.append(f"{field} not checked, {error}")
    return "names: " + "; ".join([", ".join(done), *missing] if done else missing)


def _check_kernels(backend: Backend) -> None:
    registry = importlib.import_module("hwgrpo_kernels.registry").default_registry
    known = [each for op in registry.ops() for each in registry.implementations(op.name)]
    for name in backend.kernels:
        named = [each for each in known if each.name == name]
        assert named, f"kernels has {name!r}, which is not registered: use {_listed(each.name for each in known)}"
        here = any(each.is_for(backend.device_type) for each in named)
        assert here, f"kernels has {name!r}, which has no implementation for {backend.device_type}: take it out"


def _check_modules(backend: Backend) -> None:
    known = importlib.import_module("hwgrpo_kernels.fused_modules").modules(backend.device_type)
    for name in backend.modules:
        has = f"{backend.device_type} does not have: use {_listed(known)}"
        assert name in known, f"modules has {name!r}, which {has}"


def _check_attention(backend: Backend) -> None:
    attention = importlib.import_module("hwgrpo.models.attention_implementations")
    known = (*attention.ACCEPT_MASKS, *attention.FLASH)
    for name in backend.attention:
        assert attention.is_known(name, backend), (
            f"attention has {name!r}, which hwgrpo does not know: use {_listed(known)} or a repository of the hub"
        )


def _check_rollout(backend: Backend) -> None:
    engines = importlib.import_module("hwgrpo.catalog").ENGINES
    for name in backend.rollout:
        assert name in engines, f"rollout has {name!r}, which hwgrpo does not know: use {_listed(engines.names())}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or "none"


CHECKS = {
    "kernels": _check_kernels,
    "modules": _check_modules,
    "attention": _check_attention,
    "rollout": _check_rollout,
}
