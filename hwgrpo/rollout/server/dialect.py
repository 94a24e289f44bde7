"""What engines on servers of several kinds have in common, and where the kinds differ."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.requests import Answer, Request
from hwgrpo.rollout.server.http_client import Client
from hwgrpo.rollout.server.owner import Owner
from hwgrpo.rollout.weights import AdapterWeights
from hwgrpo.values import Sampling

MODEL = "hwgrpo"
"""Name under which a server of ours serves the base model."""


@dataclass(frozen=True)
class Offer:
    """What a server says of a process group with its workers."""

    library: str
    """Its communication library and version, as `group.library` names it."""
    workers: int


@dataclass(frozen=True)
class Question:
    """All that the samples of one prompt depend on."""

    model: str
    """Name under which the server has it."""
    version: int
    """Of the weights."""
    request: Request
    sampling: Sampling
    end_ids: tuple[int, ...]
    """Tokens that end a response."""


class Dialect(Protocol):
    """How servers of one kind are started and spoken to. What asks a server raises `ServerProblem`, or `ServerTaken`
    where it has another run's weights."""

    name: str
    """The kind, in words."""
    caveat: str
    """What a user should know of servers of this kind, in words."""
    start_by_hand: str
    """How a user starts one, as a sentence."""

    def command(self, parts: EngineParts, adapter: AdapterWeights | None, host: str, port: int) -> list[str]:
        """Return the command that starts one; the token is not in it."""
        ...

    def environment(self, token: str, settings: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of one of ours.

        Args:
            token: that requests must carry.
            settings: `rollout.server.env`, which win over what is inherited.
        """
        ...

    def model_of(self, client: Client, timeout: float) -> str:
        """Return the name of the model that a server serves; fail where it is none of this kind."""
        ...

    def offer(self, client: Client, timeout: float) -> Offer | None:
        """Return what a group with its workers would be like; None where it has none to offer."""
        ...

    lease: str
    """When a server of another run may be claimed, as a sentence."""

    def claim(self, client: Client, owner: Owner, timeout: float) -> None:
        """Make a server this owner's."""
        ...

    def release(self, client: Client, owner: Owner, timeout: float) -> None:
        """Leave the server to whoever comes next."""
        ...

    def version(self, client: Client, timeout: float) -> str | None:
        """Return the label of the weights that it has; None where it cannot say."""
        ...

    def load(self, client: Client, folder: Path, version: int, adapter: bool, owner: Owner, timeout: float) -> None:
        """Have it take the weights of a folder, or the adapter that is there."""
        ...

    def sample(self, client: Client, question: Question, timeout: float) -> tuple[list[Answer], str | None]:
        """Return the samples of a prompt, and the label of the weights that drew them, as the server says it."""
        ...

    def sleep(self, client: Client, timeout: float) -> None:
        """Have it give memory back, where it can."""
        ...

    def wake(self, client: Client, timeout: float) -> bool:
        """Have it take memory again; tell whether it needs its weights anew."""
        ...


def inherited_environment(settings: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a server of ours.

    Args:
        settings: `rollout.server.env`, which win over what is inherited.
        own: which nothing wins over.
    """
    # The trainer's own paths would bring its packages into the server's environment.
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    # It is no rank of the training's process group.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    return inherited | {"DO_NOT_TRACK": "1"} | dict(settings) | dict(own)


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return a server's arguments as words of its command line; None leaves one out."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words
