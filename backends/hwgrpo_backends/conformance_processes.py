"""Conformance in child processes: visibility variables, and collectives between ranks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from hwgrpo_backends import child, environment
from hwgrpo_backends.backend import Backend
from hwgrpo_backends.conformance_rank import MARKER
from hwgrpo_backends.facts import Facts
from hwgrpo_backends.tier1 import gather_tier1

SCRIPT = Path(__file__).with_name("conformance_rank.py")
SECONDS = 180.0
HIDDEN = "-1"
"""A value of visibility variables that leaves no device."""


def check_comm(backend: Backend) -> None:
    """Look up the communication backend among those that torch has with the backend's plug-in.

    Raises:
        AssertionError: it is not there.
    """
    import torch.distributed as dist

    there = ", ".join(name for name in dist.Backend.backend_list if dist.is_backend_available(name))
    assert dist.is_backend_available(backend.comm), (
        f"comm is {backend.comm!r}, which torch.distributed does not have here, but {there}: correct the name, or let "
        "the plug-in register it"
    )


def check_visible_devices(backend: Backend, facts: Facts, count: int) -> str:
    """Count the devices in a process that may see one of several, or none of one.

    Args:
        count: devices that this process sees.

    Raises:
        AssertionError: the variable leaves another number.
    """
    name = backend.visible_env
    if backend.is_host:
        assert name is None, f"visible_env is {name!r}: the host processor has no devices to hide, so leave it out"
    if name is None:
        return "visible devices: not checked, the backend names no variable"
    value, left = (os.environ.get(name, "0").split(",")[0], 1) if count > 1 else (HIDDEN, 0)
    torch_facts = gather_tier1(facts, {**os.environ, name: value}, [backend]).torch
    assert torch_facts is not None
    assert torch_facts.imported, (
        f"visible_env: with {name}={value!r} torch does not import: {'; '.join(torch_facts.errors)}"
    )
    seen = torch_facts.devices[backend.device_type].count
    assert seen == left, (
        f"visible_env: {name}={value!r} leaves {seen} of {count} devices, not {left}: name the variable that the "
        "device's runtime reads"
    )
    return f"visible devices: {name}={value!r} leaves {left} of {count}"


def check_collectives(backend: Backend, count: int) -> str:
    """Run the collectives of strategies in each compute dtype: two ranks where there are two devices or it is the host.

    Raises:
        AssertionError: the communication backend fails, or gives other values.
    """
    world = 2 if backend.is_host else min(2, count)
    dtypes = [str(dtype).removeprefix("torch.") for dtype in backend.compute_dtypes(0)]
    environ = dict(os.environ)
    environment.apply(backend, "train", environ)
    with tempfile.TemporaryDirectory() as folder:
        requests = [_request(backend, rank, world, folder, dtypes) for rank in range(world)]
        outputs = child.run_children(SCRIPT, requests, SECONDS, environ, marker=MARKER)
    for rank, output in enumerate(outputs):
        result: dict[str, Any] = output.lines[-1] if output.lines else {"error": output.failure or "no output"}
        where = f"collectives by comm={backend.comm!r} on {backend.device_type}, rank {rank} of {world}"
        assert "error" not in result, f"{where}: {result['error']}"
        assert not result["wrong"], f"{where}: {'; '.join(result['wrong'])}"
    names = ", ".join(dict.fromkeys(each.split()[0] for each in outputs[0].lines[-1]["done"]))
    ranks = f"{world} rank{'s' if world > 1 else ''}"
    return f"collectives: {names} in {', '.join(dtypes)} by {backend.comm} over {ranks}"


def _request(backend: Backend, rank: int, world: int, folder: str, dtypes: list[str]) -> dict[str, Any]:
    return {
        "plugin": backend.plugin,
        "device": backend.device_type if backend.is_host else f"{backend.device_type}:{rank}",
        "comm": backend.comm,
        "store": f"{folder}/store",
        "rank": rank,
        "world": world,
        "dtypes": dtypes,
    }
