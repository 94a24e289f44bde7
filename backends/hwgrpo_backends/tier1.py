"""Tier 1 of the facts: what torch says, asked in a child process because a broken plug-in breaks `import torch`."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo_backends.facts import Facts, TorchFacts, _known
from hwgrpo_backends.torch_probe import MARKER

if TYPE_CHECKING:
    from hwgrpo_backends.backend import Backend

SCRIPT = Path(__file__).with_name("torch_probe.py")
_cache: dict[object, TorchFacts] = {}


def gather_tier1(
    facts: Facts,
    environ: Mapping[str, str] = os.environ,
    backends: Iterable[Backend] | None = None,
    timeout: float = 120.0,
) -> Facts:
    """Return `facts` with what torch says added; asked once per process for the same environment.

    Args:
        environ: the child's environment.
        backends: whose device types and plug-ins to ask for; every known one when left out.
        timeout: seconds that `import torch` may take (minutes happen on cold network file systems).
    """
    backends = _known() if backends is None else tuple(backends)
    targets = sorted({(b.device_type, b.plugin or "") for b in backends if not b.is_host})
    key = (tuple(targets), tuple(sorted(environ.items())))
    if key not in _cache:
        _cache[key] = _ask(targets, environ, timeout)
    torch = _cache[key]
    build = facts.torch_build
    if torch.version is not None:
        # xpu and cpu builds look alike from here; keep what the version file said.
        build = "rocm" if torch.hip else "cuda" if torch.cuda else "cpu" if build in (None, "cuda", "rocm") else build
    return dataclasses.replace(
        facts,
        torch=torch,
        torch_build=build,
        torch_version=torch.version or facts.torch_version,
        torch_toolkit=torch.hip or torch.cuda or facts.torch_toolkit,
    )


def _ask(targets: list[tuple[str, str]], environ: Mapping[str, str], timeout: float) -> TorchFacts:
    first = _run(targets, environ, timeout)
    if first["imported"] or environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return TorchFacts.from_json(first)
    # The root cause is often hidden behind the loader's own message: torch alone, then the plug-in, tells it.
    second = _run(targets, {**environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, timeout)
    if not second["imported"]:
        return TorchFacts.from_json(first)
    return TorchFacts.from_json({**second, "imported": False, "without_plugins": True, "errors": first["errors"]})


def _run(targets: list[tuple[str, str]], environ: Mapping[str, str], timeout: float) -> dict[str, Any]:
    # The question is whether the driver works, not whether NVML lists a card.
    env = {**environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}
    # -P keeps this package's folder, whose modules have everyday names, off the child's sys.path.
    command = [sys.executable, "-P", str(SCRIPT), json.dumps([[kind, plugin or None] for kind, plugin in targets])]
    child = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(child)
        return _failed(f"TimeoutError: `import torch` and a look at its devices took more than {timeout:g} seconds")
    except BaseException:
        _kill(child)
        raise
    for line in reversed(out.splitlines()):
        if line.startswith(MARKER):
            return json.loads(line[len(MARKER) :])
    code = child.returncode
    end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    last = err.strip().splitlines()[-1:] or ["nothing on stderr"]
    return _failed(f"ChildProcessError: `import torch` ended its process with {end}: {last[0][:500]}")


def _failed(error: str) -> dict[str, Any]:
    return {"imported": False, "errors": [error]}


def _kill(child: subprocess.Popen[str]) -> None:
    """End the child and whatever it started; do not wait for one that hangs inside a driver."""
    os.killpg(child.pid, signal.SIGKILL)
    try:
        child.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        for pipe in (child.stdout, child.stderr):
            if pipe:
                pipe.close()
