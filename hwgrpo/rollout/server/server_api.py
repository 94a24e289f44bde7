"""The protocol of a kind of rollout server, and code that the kinds share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hwgrpo_backends import Backend
from hwgrpo_backends.environment import apply

from hwgrpo.errors import shown
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.policy_weights import AdapterWeights
from hwgrpo.rollout.requests import Request, Sample
from hwgrpo.rollout.server.http_client import Client, InvalidResponse
from hwgrpo.rollout.server.server_owner import Owner
from hwgrpo.values import PromptImages

MODEL = "hwgrpo"
"""Name under which a server started here serves the base model."""


MOST_WORKERS = 1024
"""Workers of a server; the largest are a few machines of 8 devices."""


@dataclass(frozen=True)
class GroupSupport:
    """A server's parameters for a process group with its workers."""

    library: str
    """Communication library and version, as `group.communication_library` names them."""
    workers: int

    def __post_init__(self) -> None:
        """Check what the server claims: the trainer makes a key of each worker and waits for all."""
        if type(self.workers) is not int or not 1 <= self.workers <= MOST_WORKERS:
            raise InvalidResponse(f"the server claims workers={shown(self.workers)}, and can have 1 to {MOST_WORKERS}")


@dataclass(frozen=True)
class ServerRequest:
    """A request for samples of one prompt, with the server's model and version."""

    model: str
    """Name under which the server serves it."""
    version: int
    """Version of the weights."""
    request: Request
    end_ids: tuple[int, ...]
    """Tokens that end a response."""


@dataclass(frozen=True)
class ScoreRequest:
    """A request for the log-probs of a sequence's tokens."""

    tokens: Sequence[int]
    images: PromptImages | None = None
    """What the sequence shows."""


class ServerApi(Protocol):
    """Commands and HTTP requests of one kind of server. Methods that send a request raise `ServerProblem`, or
    `ServerInUse` where the server has another run's weights."""

    name: str
    """Name of the kind, for messages."""
    caveat: str
    """Limit of servers of this kind, for the startup notes; empty: none."""
    start_command_hint: str
    """Sentence that says how a user starts one."""

    def command(self, parts: EngineParts, adapter: AdapterWeights | None, host: str, port: int) -> list[str]:
        """Return the command that starts a server; it does not contain the token."""
        ...

    def environment(self, backend: Backend, token: str, settings: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of a server started here.

        Args:
            backend: the backend of this process.
            token: the token that requests must carry.
            settings: `rollout.server.env`, which overrides inherited variables.
        """
        ...

    def model_of(self, client: Client, timeout: float) -> str:
        """Return the name of the served model; fail where the server is of another kind."""
        ...

    def group_support(self, client: Client, timeout: float) -> GroupSupport | None:
        """Return the parameters for a group with its workers; None where it supports none."""
        ...

    takeover_rule: str
    """Sentence that says when a server of another run may be claimed."""

    def claim(self, client: Client, owner: Owner, timeout: float) -> None:
        """Claim the server for an owner."""
        ...

    def release(self, client: Client, owner: Owner, timeout: float) -> None:
        """Release the server for the next owner."""
        ...

    def version(self, client: Client, timeout: float) -> str | None:
        """Return the label of the loaded weights; None where the server cannot tell."""
        ...

    def load(self, client: Client, folder: Path, version: int, adapter: bool, owner: Owner, timeout: float) -> None:
        """Load the weights, or the adapter, of a folder."""
        ...

    def sample(self, client: Client, server_request: ServerRequest, timeout: float) -> tuple[list[Sample], str | None]:
        """Return the samples of a prompt, and the label of the weights that drew them."""
        ...

    can_score: bool
    """Whether it has `score`."""

    def score(
        self, client: Client, model: str, version: int, request: ScoreRequest, timeout: float
    ) -> tuple[list[float], str | None]:
        """Return the log-probs of a sequence's tokens after the first at temperature 1, and the weights' label.

        Args:
            client: client of the server.
            model: name under which it serves the model, with the adapter or without.
            version: version of the weights.
            request: what is scored.
            timeout: seconds.
        """
        ...

    def can_sleep(self, client: Client, timeout: float) -> bool:
        """Return whether the server was started so that it can free its memory."""
        ...

    def sleep(self, client: Client, level: int, owner: Owner, timeout: float) -> None:
        """Free the server's weights and cache until it loads weights; at level 1 weights stay in host memory."""
        ...


def inherited_environment(backend: Backend, settings: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a server started here: the backend's for rollout instead of training.

    Args:
        backend: the backend of this process.
        settings: `rollout.server.env`, which overrides inherited variables.
        own: variables that override all others.
    """
    # The trainer's own paths would bring its packages into the server's environment.
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    # The server is no rank of the training's process group.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    apply(backend, "rollout", inherited)
    return inherited | {"DO_NOT_TRACK": "1"} | dict(settings) | dict(own)


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return a server's arguments as command-line arguments; None leaves one out."""
    argv: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            argv += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return argv
