"""Finding a rollout server or starting one, which rank 0 does for all ranks."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import distributed as dist

from hwgrpo.config.schema import Config, RolloutServerConfig
from hwgrpo.errors import ConfigError
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.server.dialect import MODEL, Dialect
from hwgrpo.rollout.server.http_client import Client, Refused, ServerProblem, ServerTaken
from hwgrpo.rollout.server.owner import Owner, new_owner
from hwgrpo.rollout.server.server_process import ServerProcess, free_port
from hwgrpo.rollout.server.weight_transfer import Delivery, FolderDelivery, GroupDelivery
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import ADAPTER, OWNER_HEADER
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.group import library
from hwgrpo.rollout.weights import AdapterWeights
from hwgrpo.text import hide_secrets
from hwgrpo.waits import Wait

HEALTH_TIMEOUT = 10.0
"""Seconds in which a server that is well answers to a question after its health."""
REFUSAL_TIMEOUT = 10.0
"""Seconds that a refused token or an unknown path may last: a proxy before a server that starts refuses, too."""
PAUSE = 0.5
LARGEST_GREETING = 1 << 20
"""Bytes of the largest response that is read before a run begins."""


@dataclass
class Server:
    """A server as one rank sees it."""

    client: Client
    model: str
    """Name of the model that requests are for."""
    owner: Owner
    """Whose weights it is to have."""
    process: ServerProcess | None = None
    """Where this rank has started it."""
    delivery: Delivery | None = None
    """How it gets weights; rank 0 has it."""


def attach(parts: EngineParts, dialect: Dialect, adapter: AdapterWeights | None) -> Server:
    """Start or find the server on rank 0; tell the other ranks where it is.

    Raises:
        ConfigError: it does not start or is none of this kind, the token is missing or refused, or weights cannot go as
            `rollout.server.transfer` says.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    server: Server | None = None
    found: list[Any] = [None]
    if rank == 0:
        try:
            server = _first(parts, dialect, adapter)
            found[0] = server.client.url, server.client.token, server.model, server.owner
        except ConfigError as error:
            found[0] = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(found)
    if isinstance(found[0], ConfigError):
        raise found[0]
    url, token, model, owner = found[0]
    return server or Server(_client(parts.config, url, token, owner), model, owner)


def check_vllm_server(config: Config) -> None:
    """Check that a vLLM server can be started, or that there is a token for the one that runs."""
    _check_server(config, "vllm")


def check_sglang_server(config: Config) -> None:
    """Check that an SGLang server can be started, or that there is a token for the one that runs."""
    _check_server(config, "sglang")


def _check_server(config: Config, package: str) -> None:
    settings = config.rollout.server
    if settings.url is not None:
        _token_for(settings)
        return
    token_in(settings.token_variable)
    if settings.python is not None and shutil.which(Path(settings.python).expanduser()) is None:
        raise ConfigError(
            f"rollout.server.python={settings.python!r} cannot be run: there is no such program; name the Python of an "
            "environment that has the server"
        )
    elsewhere = settings.python is not None or "PYTHONPATH" in settings.env
    if not elsewhere and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"rollout.engine={config.rollout.engine!r}: the package {package} is not installed in this environment; "
            "name the Python of one that has it as rollout.server.python"
        )


def _first(parts: EngineParts, dialect: Dialect, adapter: AdapterWeights | None) -> Server:
    settings = parts.config.rollout.server
    owner = new_owner(parts.run_id, parts.config.trainer.output_dir, take_over=settings.take_over)
    if settings.url is None:
        server = _start(parts, dialect, adapter, owner)
    else:
        client = _client(parts.config, settings.url, _token_for(settings), owner)
        model = _served_model(client, dialect)
        server = Server(client, model if adapter is None else ADAPTER, owner)
    try:
        _claim(parts, dialect, server)
        server.delivery = choose_delivery(parts, dialect, server.client, adapter, owner)
    except BaseException:
        if server.process is not None:
            server.process.stop()
        raise
    return server


def check_running_server(config: Config, dialect: Dialect) -> None:
    """Check that the server at `rollout.server.url` is there, is of this kind and takes the token.

    Raises:
        ConfigError: it is not, or does not.
    """
    url = config.rollout.server.url
    assert url is not None
    _served_model(Client(url, _token_for(config.rollout.server), LARGEST_GREETING), dialect)


def _token_for(settings: RolloutServerConfig) -> str:
    """Return the token for a server that runs already."""
    token = token_in(settings.token_variable)
    if not token:
        assert settings.url is not None
        raise ConfigError(
            f"rollout.server.url={hide_secrets(settings.url)!r} needs a token: set {settings.token_variable} "
            "(rollout.server.token_variable) to the one that the server was started with"
        )
    return token


def token_in(variable: str) -> str:
    """Return the token that a variable holds; empty where it is not set.

    Raises:
        ConfigError: it cannot be sent in a header.
    """
    token = os.environ.get(variable, "")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"the environment variable {variable} (rollout.server.token_variable) holds a blank, a line end or another "
            "character that no token may have; set it to the token alone"
        )
    return token


def _client(config: Config, url: str, token: str, owner: Owner) -> Client:
    largest = int(config.rollout.server.max_reply_mb * 2**20)
    return Client(url, token, largest, {OWNER_HEADER: owner.session})


def _start(parts: EngineParts, dialect: Dialect, adapter: AdapterWeights | None, owner: Owner) -> Server:
    s = parts.config.rollout.server
    port = s.port or free_port(s.host)
    token = token_in(s.token_variable) or secrets.token_urlsafe(32)
    log = Path(parts.config.trainer.output_dir) / "rollout-server.log"
    process = ServerProcess(dialect.command(parts, adapter, s.host, port), dialect.environment(token, s.env), log)
    # What listens on all addresses is reached by this one.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(s.host, s.host)
    client = _client(parts.config, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", token, owner)
    try:
        process.start()
        process.wait_until_healthy(client, s.start_timeout)
    except BaseException:
        process.stop()
        raise
    return Server(client, MODEL if adapter is None else ADAPTER, owner, process)


def _served_model(client: Client, dialect: Dialect) -> str:
    try:
        return unless_refused_for_long(lambda: dialect.model_of(client, HEALTH_TIMEOUT), hide_secrets(client.url))
    except Refused as error:
        raise ConfigError(f"{error}. {dialect.start_by_hand}") from error
    except ServerProblem as error:
        raise ConfigError(
            f"rollout.server.url={hide_secrets(client.url)!r}: no {dialect.name} server answers there: {error}"
        ) from error


def unless_refused_for_long(ask: Callable[[], str], url: str) -> str:
    """Return what a server answers, asking again while it refuses the token or does not know the path.

    Raises:
        Refused: it goes on doing so.
        ServerProblem: it does not answer, or with something invalid.
    """
    wait = Wait(f"the server at {url}, which refuses requests", REFUSAL_TIMEOUT)
    while True:
        try:
            return ask()
        except Refused:
            if wait.over:
                raise
            wait.pause(PAUSE)


def _claim(parts: EngineParts, dialect: Dialect, server: Server) -> None:
    """Make the server this run's, waiting for another run to leave it for as long as the settings say."""
    s, url = parts.config.rollout.server, hide_secrets(server.client.url)
    wait = None
    while True:
        try:
            return dialect.claim(server.client, server.owner, HEALTH_TIMEOUT)
        except ServerTaken as taken:
            wait = wait or Wait(f"{taken.holder} to leave the server at {url}", s.wait_for_owner)
            if wait.over:
                raise ConfigError(
                    f"rollout.server.url={url!r} is in use by another run: {taken.holder}. Wait for it "
                    f"(rollout.server.wait_for_owner={s.wait_for_owner:g} s), or give this run its own server; "
                    f"{dialect.lease}"
                ) from taken
            wait.pause(PAUSE)
        except ServerProblem as error:
            raise ConfigError(f"the rollout server at {url} cannot be claimed: {error}") from error


def choose_delivery(
    parts: EngineParts, dialect: Dialect, client: Client, adapter: AdapterWeights | None, owner: Owner
) -> FolderDelivery | GroupDelivery:
    """Return the way that weights go, and have it ready.

    Raises:
        ConfigError: `rollout.server.transfer` asks for a group that cannot be.
    """
    s = parts.config.rollout.server

    def load(folder: Path, version: int, is_adapter: bool) -> None:
        dialect.load(client, folder, version, is_adapter, owner, s.request_timeout)

    if s.transfer == "folder" or s.weights_dir is not None:
        return FolderDelivery(s.weights_dir, parts.compute_dtype, owner, load)
    small = "an adapter alone is trained, which is small"
    group = small if adapter is not None else _group(parts, dialect, client, owner)
    if isinstance(group, GroupDelivery):
        return group
    if s.transfer == "group":
        raise ConfigError(
            f"rollout.server.transfer='group': {group}; use rollout.server.transfer=folder, or leave it out"
        )
    return FolderDelivery(None, parts.compute_dtype, owner, load, why=group)


def _group(parts: EngineParts, dialect: Dialect, client: Client, owner: Owner) -> GroupDelivery | str:
    """Return a group with the server's workers, or what is in its way."""
    backend = parts.device.comm_backend
    ours = library(backend)
    try:
        offer = dialect.offer(client, HEALTH_TIMEOUT)
        if offer is None:
            return "the server offers no process group"
        if offer.library != ours:
            return f"the trainer communicates by {ours} and the server by {offer.library}"
        return GroupDelivery(
            client,
            owner,
            backend=backend,
            library=ours,
            device=parts.device.torch_device,
            dtype=parts.compute_dtype,
            workers=offer.workers,
            seconds=parts.config.rollout.server.request_timeout,
        )
    except ServerProblem as problem:
        return f"a process group over {ours} could not be made: {problem}"
