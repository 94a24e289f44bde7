"""Connections to the rollout servers, which rank 0 finds or starts for all ranks."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwgrpo_backends import Backend
from torch import distributed as dist

from hwgrpo.config import Config
from hwgrpo.config.rollout_rules import server_urls
from hwgrpo.config.schema import RolloutConfig, RolloutServerConfig
from hwgrpo.errors import ConfigError
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.policy_weights import AdapterWeights
from hwgrpo.rollout.server.http_client import Client, RefusedByServer, ServerInUse, ServerProblem
from hwgrpo.rollout.server.server_api import MODEL, ServerApi
from hwgrpo.rollout.server.server_environment import server_python
from hwgrpo.rollout.server.server_owner import Owner, new_owner
from hwgrpo.rollout.server.server_process import ServerProcess, free_ports
from hwgrpo.rollout.server.weight_transfer import FolderTransfer, GroupTransfer, WeightTransfer
from hwgrpo.rollout.shared_devices import server_devices, shares_device
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import ADAPTER, OWNER_HEADER
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.group import communication_library
from hwgrpo.support.text import hide_secrets
from hwgrpo.support.waits import Wait

HEALTH_TIMEOUT = 10.0
"""Seconds within which a healthy server responds to a health check."""
REFUSAL_TIMEOUT = 10.0
"""Seconds for which a rejected token or an unknown path is retried: a proxy of a starting server rejects, too."""
PAUSE = 0.5
MAX_CHECK_RESPONSE = 1 << 20
"""Limit in bytes of a response to a check before the run starts."""


@dataclass
class ServerConnection:
    """One rank's connection to a server."""

    client: Client
    model: str
    """Name of the served model."""
    process: ServerProcess | None = None
    """The server's process, if this rank has started it."""
    base_model: str = MODEL
    """Name of the served model without the adapter; on rank 0 only."""


@dataclass
class ServerConnections:
    """One rank's connections to all servers."""

    servers: list[ServerConnection]
    owner: Owner
    """This run, as the owner of the servers' weights."""
    transfer: WeightTransfer | None = None
    """Transfer of weights; on rank 0 only."""


def connect_servers(parts: EngineParts, api: ServerApi, adapter: AdapterWeights | None) -> ServerConnections:
    """Start or find the servers on rank 0 and broadcast their addresses to the other ranks.

    Raises:
        ConfigError: a server does not start or is of another kind, the token is missing or rejected, or
            `rollout.server.transfer` cannot be used.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    first: ServerConnections | None = None
    broadcast: list[Any] = [None]
    if rank == 0:
        try:
            first = _connect_first(parts, api, adapter)
            broadcast[0] = first.owner, [(each.client.url, each.client.token, each.model) for each in first.servers]
        except ConfigError as error:
            broadcast[0] = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(broadcast)
    if isinstance(broadcast[0], ConfigError):
        raise broadcast[0]
    owner, addresses = broadcast[0]
    settings = parts.config.rollout.server
    others = [ServerConnection(_client(settings, url, token, owner), model) for url, token, model in addresses]
    return first or ServerConnections(others, owner)


def check_vllm_server(config: Config) -> None:
    """Check that a vLLM server can be started, or that a token for the running one is set."""
    _check_server(config.rollout, "vllm")


def check_sglang_server(config: Config) -> None:
    """Check that an SGLang server can be started, or that a token for the running one is set."""
    _check_server(config.rollout, "sglang")


def _check_server(rollout: RolloutConfig, package: str) -> None:
    settings = rollout.server
    if settings.url is not None:
        _token_for(settings)
        return
    token_in(settings.token_variable)
    if settings.python is not None and shutil.which(Path(settings.python).expanduser()) is None:
        raise ConfigError(
            f"rollout.server.python={settings.python!r} cannot be run: there is no such program; name the Python of an "
            "environment that has the server"
        )
    python_of(rollout, package)


def python_of(rollout: RolloutConfig, package: str, backend: Backend | None = None) -> tuple[str, str]:
    """Return the Python for a server that the run starts, and what its vLLM said.

    Args:
        rollout: settings of the engine and its server.
        package: what the server needs: vllm or sglang.
        backend: the device family; None: it is judged by records alone.

    Raises:
        ConfigError: no environment has a fitting one.
    """
    found = server_python(rollout.server, package, backend)
    if found.python is None:
        make = "; `bash scripts/setup.sh --rollout vllm` makes one, on Ascend `--rollout vllm-ascend`"
        raise ConfigError(
            f"rollout.engine={rollout.engine!r}: {'; '.join(found.reasons)}; "
            f"name the Python of one that has it as rollout.server.python{make if package == 'vllm' else ''}"
        )
    return found.python, found.said


def ask_vllm_server(config: Config, backend: Backend) -> str:
    """Return what the vLLM of the server to start says of itself; empty where it is not asked.

    Raises:
        ConfigError: none fits the run's devices.
    """
    return "" if config.rollout.server.url is not None else python_of(config.rollout, "vllm", backend)[1]


def _connect_first(parts: EngineParts, api: ServerApi, adapter: AdapterWeights | None) -> ServerConnections:
    settings = parts.config.rollout.server
    owner = new_owner(parts.run_id, parts.config.trainer.output_dir, take_over=settings.take_over)
    found = ServerConnections([], owner)
    try:
        if settings.url is None:
            found.servers = _start(parts, api, adapter, owner)
        for url in server_urls(settings):
            client = _client(settings, url, _token_for(settings), owner)
            model = _served_model(client, api)
            found.servers.append(ServerConnection(client, model if adapter is None else ADAPTER, base_model=model))
        clients = [server.client for server in found.servers]
        _claim(parts, api, clients, owner)
        found.transfer = select_transfer(parts, api, clients, adapter, owner)
    except BaseException:
        for server in found.servers:
            disconnect_server(server, api, owner)
        raise
    return found


def disconnect_server(server: ServerConnection, api: ServerApi, owner: Owner) -> None:
    """End a server that the run started, or release it for the next run."""
    if server.process is not None:
        server.process.stop()
        return
    with contextlib.suppress(ServerProblem, ServerInUse):  # it may be gone, or another run's
        api.release(server.client, owner, HEALTH_TIMEOUT)


def check_running_server(rollout: RolloutConfig, api: ServerApi) -> None:
    """Check that each server at `rollout.server.url` responds, is of this kind and accepts the token.

    Raises:
        ConfigError: one of these does not hold, or it cannot sleep as `rollout.sleep_mode` wants.
    """
    for url in server_urls(rollout.server):
        client = Client(url, _token_for(rollout.server), MAX_CHECK_RESPONSE)
        _served_model(client, api)
        if rollout.sleep_mode == "always" and not api.can_sleep(client, HEALTH_TIMEOUT):
            raise ConfigError(
                f"rollout.sleep_mode='always' with rollout.server.url={hide_secrets(url)!r}: that server cannot free "
                "its memory: start it with --enable-sleep-mode, or leave rollout.sleep_mode out"
            )


def _token_for(settings: RolloutServerConfig) -> str:
    """Return the token for running servers."""
    token = token_in(settings.token_variable)
    if not token:
        urls = ", ".join(hide_secrets(url) for url in server_urls(settings))
        raise ConfigError(
            f"rollout.server.url={urls!r} needs a token: set {settings.token_variable} "
            "(rollout.server.token_variable) to the one that the server was started with"
        )
    return token


def token_in(variable: str) -> str:
    """Return the token in an environment variable; empty where it is not set.

    Raises:
        ConfigError: the token cannot be sent in a header.
    """
    token = os.environ.get(variable, "")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"the environment variable {variable} (rollout.server.token_variable) has a blank, a line end or another "
            "character that no token may have; set it to the token alone"
        )
    return token


def _client(settings: RolloutServerConfig, url: str, token: str, owner: Owner) -> Client:
    largest = int(settings.max_reply_mb * 2**20)
    return Client(url, token, largest, {OWNER_HEADER: owner.session})


def _start(parts: EngineParts, api: ServerApi, adapter: AdapterWeights | None, owner: Owner) -> list[ServerConnection]:
    """Start the run's own server, or one for every few of several training devices that vLLM shares."""
    s, backend = parts.config.rollout.server, parts.device.backend
    devices = server_devices(parts.config.rollout, backend.visible_env, os.environ)
    token = token_in(s.token_variable) or secrets.token_urlsafe(32)
    # A server that listens on all addresses is reached through the loopback address.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(s.host, s.host)
    servers: dict[ServerProcess, ServerConnection] = {}
    try:
        devices = devices or [""]
        ports = [s.port + number for number in range(len(devices))] if s.port else free_ports(s.host, len(devices))
        for number, (visible, port) in enumerate(zip(devices, ports, strict=True)):
            own = {backend.visible_env: visible} if backend.visible_env and visible else {}
            log = Path(parts.config.trainer.output_dir) / f"rollout-server{f'-{number}' if own else ''}.log"
            environment = api.environment(backend, token, s.env | own)
            process = ServerProcess(api.command(parts, adapter, s.host, port), environment, log)
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            client = _client(s, url, token, owner)
            servers[process] = ServerConnection(client, MODEL if adapter is None else ADAPTER, process)
            process.start()
        for process, server in servers.items():
            process.wait_until_healthy(server.client, s.start_timeout)
    except BaseException:
        for process in servers:
            process.stop()
        raise
    return [*servers.values()]


def _served_model(client: Client, api: ServerApi) -> str:
    try:
        return retry_refusals(lambda: api.model_of(client, HEALTH_TIMEOUT), hide_secrets(client.url))
    except RefusedByServer as error:
        raise ConfigError(f"{error}. {api.start_command_hint}") from error
    except ServerProblem as error:
        raise ConfigError(
            f"rollout.server.url={hide_secrets(client.url)!r}: no {api.name} server answers there: {error}"
        ) from error


def retry_refusals(request: Callable[[], str], url: str) -> str:
    """Return the result of a request, retried while the server rejects the token or the path.

    Raises:
        RefusedByServer: it still rejects them after `REFUSAL_TIMEOUT`.
        ServerProblem: no response, or an invalid one.
    """
    wait = Wait(f"the server at {url}, which refuses requests", REFUSAL_TIMEOUT)
    while True:
        try:
            return request()
        except RefusedByServer:
            if wait.over:
                raise
            wait.pause(PAUSE)


def _claim(parts: EngineParts, api: ServerApi, clients: Sequence[Client], owner: Owner) -> None:
    """Claim the servers for this run, waiting up to `wait_for_owner` seconds for another run to release them."""
    s, wait = parts.config.rollout.server, None
    ordered = sorted(clients, key=lambda client: client.url)  # of runs that share some, the first to claim gets all
    unclaimed = [*ordered]
    while unclaimed:
        client = unclaimed[0]
        url = hide_secrets(client.url)
        try:
            api.claim(client, owner, HEALTH_TIMEOUT)
            del unclaimed[0]
        except ServerInUse as in_use:
            wait = wait or Wait(f"{in_use.holder} to leave the server at {url}", s.wait_for_owner)
            if wait.over:
                raise ConfigError(
                    f"rollout.server.url={url!r} is in use by another run: {in_use.holder}. Wait for it "
                    f"(rollout.server.wait_for_owner={s.wait_for_owner:g} s), or give this run its own server; "
                    f"{api.takeover_rule}"
                ) from in_use
            wait.pause(PAUSE)
            unclaimed = [*ordered]  # claims of silent owners expire
        except ServerProblem as error:
            raise ConfigError(f"the rollout server at {url} cannot be claimed: {error}") from error


def select_transfer(
    parts: EngineParts, api: ServerApi, clients: Sequence[Client], adapter: AdapterWeights | None, owner: Owner
) -> FolderTransfer | GroupTransfer:
    """Return the weight transfer, ready for use; all servers have the same.

    Raises:
        ConfigError: `rollout.server.transfer` asks for a group that cannot be made.
    """
    s = parts.config.rollout.server

    def load(client: Client, folder: Path, version: int, is_adapter: bool) -> None:
        api.load(client, folder, version, is_adapter, owner, s.request_timeout)

    if s.transfer == "folder" or s.weights_dir is not None:
        return FolderTransfer(s.weights_dir, parts.compute_dtype, owner, load)
    adapter_only = "only an adapter is trained, which is small"
    groups = adapter_only if adapter is not None else _make_groups(parts, api, clients, owner)
    if isinstance(groups, GroupTransfer):
        return groups
    if s.transfer == "group":
        raise ConfigError(
            f"rollout.server.transfer='group': {groups}; use rollout.server.transfer=folder, or leave it out"
        )
    return FolderTransfer(None, parts.compute_dtype, owner, load, reason=groups)


def _make_groups(parts: EngineParts, api: ServerApi, clients: Sequence[Client], owner: Owner) -> GroupTransfer | str:
    """Return a transfer by a group with each server's workers, or why there is none."""
    backend = parts.device.comm_backend
    library = communication_library(backend)
    workers: dict[Client, int] = {}
    if len(clients) > 1 and shares_device(parts.config.rollout):
        return "the servers compute on the training devices, and two ranks of a group may not share one"
    try:
        for client in clients:
            support = api.group_support(client, HEALTH_TIMEOUT)
            place = f" at {hide_secrets(client.url)}" if len(clients) > 1 else ""
            if support is None:
                return f"the server{place} offers no process group"
            if support.library != library:
                return f"the trainer communicates by {library} and the server{place} by {support.library}"
            workers[client] = support.workers
        return GroupTransfer(
            workers,
            owner,
            backend=backend,
            library=library,
            device=parts.device.torch_device,
            dtype=parts.compute_dtype,
            seconds=parts.config.rollout.server.request_timeout,
        )
    except ServerProblem as problem:
        return f"a process group over {library} could not be made: {problem}"
