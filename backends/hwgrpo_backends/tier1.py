"""Tier 1 of the facts: from torch in a child process, because a broken plug-in breaks `import torch`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo_backends import torch_build
from hwgrpo_backends.facts import Facts, TorchFacts
from hwgrpo_backends.tier0 import known_backends
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
    """Return `facts` with those of torch added; gathered once per process for the same environment.

    Args:
        environ: the child's environment.
        backends: whose device types and plug-ins to ask for; every known one when left out.
        timeout: seconds that `import torch` may take (minutes happen on cold network file systems).
    """
    backends = known_backends() if backends is None else tuple(backends)
    targets = sorted({(b.device_type, b.plugin or "") for b in backends if not b.is_host})
    key = (tuple(targets), tuple(sorted(environ.items())))
    if key not in _cache:
        _cache[key] = _ask(targets, environ, timeout)
    torch = _cache[key]
    build = facts.torch_build
    if torch.version is not None:
        # xpu and cpu builds look alike here; keep the value of the version file.
        said = torch_build.of_toolkits(torch.cuda, torch.hip)
        build = build if said == "cpu" and build == "xpu" else said
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
    # The loader's message often hides the root cause; importing torch alone, then the plug-in, shows it.
    second = _run(targets, {**environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, timeout)
    if not second["imported"]:
        return TorchFacts.from_json(first)
    return TorchFacts.from_json({**second, "imported": False, "without_plugins": True, "errors": first["errors"]})


def _run(targets: list[tuple[str, str]], environ: Mapping[str, str], timeout: float) -> dict[str, Any]:
    from hwgrpo_backends import child  # starting processes takes more imports than all of tier 0

    # Check whether the driver works, not whether NVML lists a card.
    env = {**environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}
    request = [[kind, plugin or None] for kind, plugin in targets]
    (output,) = child.run_children(SCRIPT, [request], timeout, env, marker=MARKER)
    failure = output.failure or "it ended without output"
    if output.lines:
        found = output.lines[-1]
        problem = f"looking at the devices did not end well: {failure}"
        unseen = {kind: {"available": False, "count": 0, "problem": problem} for kind, _ in targets}
        return {**found, "devices": {**unseen, **found["devices"]}} if found["imported"] else found
    error = f"ChildProcessError: torch was imported in a child process: {failure}"
    return {"imported": False, "errors": [error], "timed_out": output.timed_out}
