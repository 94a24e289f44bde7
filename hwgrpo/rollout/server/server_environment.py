"""The environment of a server that the run starts: the named one, the trainer's, or a rollout environment.

A rollout environment is found by its name, in the current folder, too: it is executed only where its owner is trusted.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

from hwgrpo_backends import Backend

import hwgrpo
from hwgrpo.config.schema import RolloutServerConfig
from hwgrpo.rollout.server.server_api import inherited_environment
from hwgrpo.rollout.vllm import installed_vllm
from hwgrpo.rollout.vllm.installed_vllm import SERVER, is_supported
from hwgrpo.support.permissions import why_untrusted

SOURCES = Path(hwgrpo.__file__).parents[1]
ENVIRONMENTS = (".venv-vllm", ".venv-vllm-ascend")
"""Rollout environments of `scripts/setup.sh --rollout`, in its folder or the current one."""


class ServerPython(NamedTuple):
    """The Python for a server."""

    python: str | None
    """None: there is none."""
    said: str = ""
    """What was asked, and what it said; empty where nothing was."""
    reasons: tuple[str, ...] = ()
    """Why not each environment that was looked at before it."""


def server_python(settings: RolloutServerConfig, package: str, backend: Backend | None = None) -> ServerPython:
    """Return the Python for the server: the named one, this one, or that of a rollout environment.

    Of the last two it is the first whose vLLM is supported and computes on the run's devices; the user may name any.

    Args:
        settings: the run's settings of the server.
        package: what the server needs: vllm or sglang.
        backend: the device family; None: vLLM is not asked, and judged by its records.
    """
    if settings.python:
        return ServerPython(str(Path(settings.python).expanduser()))
    if "PYTHONPATH" in settings.env:
        return ServerPython(sys.executable)
    if package != "vllm":
        is_here = importlib.util.find_spec(package) is not None
        return ServerPython(sys.executable) if is_here else ServerPython(None, "", (_missing(package),))
    reasons: list[str] = []
    for python, environment in _candidates():
        reason, said = _judge(python, environment, settings, backend)
        if reason is None:
            return ServerPython(str(python), said, tuple(reasons))
        reasons.append(reason)
    return ServerPython(None, "", tuple(reasons))


def _candidates() -> list[tuple[Path, Path | None]]:
    """Return the Pythons to look at, each with its environment's folder; None: this process's."""
    folders = dict.fromkeys(folder / name for folder in (SOURCES, Path.cwd()) for name in ENVIRONMENTS)
    found = [(folder / "bin" / "python", folder) for folder in folders]
    return [(Path(sys.executable), None), *((python, folder) for python, folder in found if python.is_file())]


def _judge(
    python: Path, environment: Path | None, settings: RolloutServerConfig, backend: Backend | None
) -> tuple[str | None, str]:
    """Return why an environment is not used (None: it is), and what it said."""
    if environment is None and importlib.util.find_spec("vllm") is None:
        return _missing("vllm"), ""
    if environment is not None:
        if untrusted := why_untrusted(SOURCES, environment, python.parent, python):
            return f"{environment} is not used: {untrusted}; to use it, name it: rollout.server.python={python}", ""
        if not installed_vllm.has_vllm(environment):
            return f"{environment} has no vLLM", ""
    _, version = next(installed_vllm.records(environment), ("vllm", "unknown"))
    if is_supported(version, SERVER) is False:
        where = "this environment" if environment is None else environment
        return f"{where} has vLLM {version}, and a server needs {SERVER}", ""
    if backend is None:
        return None, ""
    found = installed_vllm.ask(str(python), inherited_environment(backend, dict(settings.env), {}))
    reason = found.why_unfit(backend, SERVER)
    if reason is not None:
        return f"{reason}; to use it all the same, name it: rollout.server.python={python}", ""
    return None, found.text


def _missing(package: str) -> str:
    return f"the package {package} is not installed in this environment"
