"""Ranks that a launcher such as torchrun has started. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from hwgrpo.errors import ConfigError, shown

LAUNCHER = "start several processes with torchrun or `hwgrpo launch`, or unset RANK, LOCAL_RANK and WORLD_SIZE"
"""Remedy for variables that no launcher sets so."""


class LaunchedRank(NamedTuple):
    """This process among those of its run."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def launched_rank(environ: Mapping[str, str] | None = None) -> LaunchedRank:
    """Return this process's rank, from the launcher's variables; one that is unset or empty has its default.

    Args:
        environ: the launcher's variables; None: those of this process.

    Raises:
        ConfigError: a variable is no whole number, or RANK is not below WORLD_SIZE.
    """
    environ = os.environ if environ is None else environ
    world_size = whole_number(environ, "WORLD_SIZE", default=1, least=1)
    rank = whole_number(environ, "RANK", default=0)
    if rank >= world_size:
        source = "" if environ.get("WORLD_SIZE") else ", its default"
        raise ConfigError(f"RANK={rank} in the environment must be below WORLD_SIZE={world_size}{source}: {LAUNCHER}")
    local_rank = whole_number(environ, "LOCAL_RANK", default=0)
    return LaunchedRank(rank, local_rank, world_size, local_world_size(world_size, environ))


def local_world_size(world_size: int, environ: Mapping[str, str] | None = None) -> int:
    """Return the number of ranks on this host.

    Args:
        world_size: the result where the launcher does not say.
        environ: the launcher's variables; None: those of this process.

    Raises:
        ConfigError: the variable is no whole number.
    """
    environ = os.environ if environ is None else environ
    return whole_number(environ, "LOCAL_WORLD_SIZE", default=world_size, least=1)


def launcher_variables(devices: int, nodes: int = 1) -> dict[str, str]:
    """Return the variables that torchrun sets in the first process, for a plan of them all; none for one process.

    Args:
        devices: devices per node, one process each.
        nodes: number of nodes.
    """
    if devices * nodes == 1:
        return {}
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": devices * nodes, "LOCAL_WORLD_SIZE": devices}
    return {name: str(value) for name, value in values.items()} | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def whole_number(environ: Mapping[str, str], name: str, *, default: int, least: int = 0) -> int:
    """Return a variable as a whole number of at least `least`; `default` where it is unset or empty.

    Raises:
        ConfigError: it is no such number.
    """
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise ConfigError(
            f"{name}={shown(text)} in the environment must be a whole number of at least {least}: {LAUNCHER}"
        )
    return int(text)
