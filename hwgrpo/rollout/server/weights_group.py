"""The trainer's side of a process group with a server's workers, which sends weights."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import distributed as dist

from hwgrpo.rollout.server.http_client import Client, ServerProblem
from hwgrpo.rollout.server.server_owner import Owner
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import GROUP_ROUTE
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.group import Group, WeightBucket

PAUSE = 0.005
JOIN_TIMEOUT = 120.0
"""Seconds in which all must have joined the group, at most: waiting does not open a firewall."""


class GroupProblem(ServerProblem):
    """The group could not be made, or broke; a new one may work."""


class WeightsGroup:
    """Process group of this process, rank 0, and all workers of a server, which join on an HTTP request.

    Args:
        client: client of the server.
        owner: owner of the weights.
        backend: torch.distributed's name of the communication library, the same on both sides.
        device: device to send from.
        workers: number of the server's workers.
        seconds: timeout of each step.

    Raises:
        ServerProblem: the workers did not join.
    """

    def __init__(
        self, client: Client, owner: Owner, backend: str, device: torch.device, workers: int, seconds: float
    ) -> None:
        self._client, self._owner, self._workers, self._seconds = client, owner, workers, seconds
        self._transfers = 0
        self.name = f"hwgrpo-weights-{secrets.token_hex(8)}"
        try:
            host, listening = _listen(client.url)
            port = listening.getsockname()[1]
            self._store = dist.TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
                timeout=timedelta(seconds=seconds),
            )
        except (OSError, RuntimeError) as error:  # torch's own are RuntimeErrors
            raise GroupProblem(
                f"the store at which the server's workers would join cannot be opened: {error}"
            ) from error
        times = {"patience": min(JOIN_TIMEOUT, seconds), "seconds": seconds}
        body = {"name": self.name, "size": 1 + workers, "backend": backend, **times}
        with (
            self._request_server(GROUP_ROUTE, {**body, "host": host, "port": port}, "here") as reply,
            _server_reason(reply),
        ):
            self._group = Group(self._store, 0, device=device, **body)

    def send(self, buckets: Iterable[WeightBucket], route: str, body: dict[str, Any]) -> None:
        """Request the server to receive weights, and send them.

        Args:
            buckets: buckets of all weights.
            route: route of the request.
            body: its body, without the number of the transfer.

        Raises:
            ServerProblem: the weights did not arrive. The group cannot be used any more.
        """
        number, self._transfers = self._transfers, self._transfers + 1
        with self._request_server(route, {**body, "transfer": number}, f"transfer {number}") as reply:
            for bucket in buckets:  # an error in making one is not the server's
                with _server_reason(reply):
                    self._group.send(bucket)
            with _server_reason(reply):
                self._group.finish()

    def close(self) -> None:
        """Destroy the group."""
        group: Group | None = getattr(self, "_group", None)
        if group is not None:
            group.close()

    @contextmanager
    def _request_server(self, route: str, body: dict[str, Any], stage: str) -> Iterator[Future[Any]]:
        """Send a request to the server; run the block once all its workers have reached a stage."""
        body = {**body, "owner": self._owner.payload()}
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(lambda: self._client.request("POST", route, body, timeout=self._seconds))
            try:
                self._wait_for_workers(stage, reply)
                yield reply
                reply.result()
            except BaseException:
                self.close()  # also ends the server's waiting
                raise

    def _wait_for_workers(self, stage: str, reply: Future[Any]) -> None:
        """Wait until all workers have reached a stage; from there on only their death could block this rank."""
        keys = [f"{self.name} {stage} {rank}" for rank in range(1, 1 + self._workers)]
        seconds = min(JOIN_TIMEOUT, self._seconds) if stage == "here" else self._seconds
        end = time.monotonic() + seconds
        while not self._store.check(keys):
            if reply.done():
                reply.result()
            if time.monotonic() > end:
                raise GroupProblem(f"the server's workers did not join the group within {seconds:g} s")
            time.sleep(PAUSE)


@contextmanager
def _server_reason(reply: Future[Any]) -> Iterator[None]:
    """Convert torch's errors in the block, with the server's own error where it has sent one."""
    try:
        yield
    except RuntimeError as error:  # a worker is gone, or takes too long
        server_error = f"; the server: {reply.exception()}" if reply.done() and reply.exception() else ""
        raise GroupProblem(f"the process group broke: {error}{server_error}") from error


def _listen(url: str) -> tuple[str, socket.socket]:
    """Return this machine's address that a server at `url` can reach, and a socket listening only there."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    addresses = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: the system selects the route
        host = str(probe.getsockname()[0])
    listening = socket.create_server((host, 0), family=family, backlog=128)
    return host, listening
