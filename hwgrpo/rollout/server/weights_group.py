"""The trainer's side of a process group with a server's workers: it waits for them, and sends weights."""

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
from hwgrpo.rollout.server.owner import Owner
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import GROUP_ROUTE
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.group import Group, Parcel

PAUSE = 0.005
PATIENCE = 120.0
"""Seconds, at most, in which all must have met: what keeps them apart, a firewall say, does not pass by waiting."""


class GroupProblem(ServerProblem):
    """The group could not be made, or broke; a new one may do."""


class WeightsGroup:
    """A group of this process, rank 0, and all workers of a server. The server is asked over HTTP to have them meet.

    Args:
        client: of the server.
        owner: whose weights it carries.
        backend: torch.distributed's name of the communication library, the same on both sides.
        device: that this process sends from.
        workers: of the server.
        seconds: that a step of anything may take.

    Raises:
        ServerProblem: the server did not do its part.
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
            raise GroupProblem(f"the server's workers have no place to meet this process at: {error}") from error
        times = {"patience": min(PATIENCE, seconds), "seconds": seconds}
        order = {"name": self.name, "size": 1 + workers, "backend": backend, **times}
        with self._asked(GROUP_ROUTE, {**order, "host": host, "port": port}, "here") as asked, _told(asked):
            self._group = Group(self._store, 0, device=device, **order)

    def send(self, parcels: Iterable[Parcel], route: str, order: dict[str, Any]) -> None:
        """Have the server receive weights, and send them.

        Args:
            parcels: of all weights.
            route: that takes the order.
            order: what it says beside the number of the transfer.

        Raises:
            ServerProblem: they did not arrive. The group cannot be used any more.
        """
        number, self._transfers = self._transfers, self._transfers + 1
        with self._asked(route, {**order, "transfer": number}, f"transfer {number}") as asked:
            for parcel in parcels:  # what goes wrong in making one is no fault of the server's
                with _told(asked):
                    self._group.send(parcel)
            with _told(asked):
                self._group.finish()

    def close(self) -> None:
        """Leave the group."""
        group: Group | None = getattr(self, "_group", None)
        if group is not None:
            group.close()

    @contextmanager
    def _asked(self, route: str, order: dict[str, Any], stage: str) -> Iterator[Future[Any]]:
        """Ask the server for its part; run the block when all its workers have begun theirs."""
        order = {**order, "owner": self._owner.order()}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(lambda: self._client.ask("POST", route, order, timeout=self._seconds))
            try:
                self._wait_for_workers(stage, asked)
                yield asked
                asked.result()
            except BaseException:
                self.close()  # which ends the server's waiting, too
                raise

    def _wait_for_workers(self, stage: str, asked: Future[Any]) -> None:
        """Return when all workers have come to a stage: from there on only their death could keep this rank waiting."""
        keys = [f"{self.name} {stage} {rank}" for rank in range(1, 1 + self._workers)]
        seconds = min(PATIENCE, self._seconds) if stage == "here" else self._seconds
        end = time.monotonic() + seconds
        while not self._store.check(keys):
            if asked.done():
                asked.result()
            if time.monotonic() > end:
                raise GroupProblem(f"the server's workers did not come to the group within {seconds:g} s")
            time.sleep(PAUSE)


@contextmanager
def _told(asked: Future[Any]) -> Iterator[None]:
    """Turn torch's errors within the block into the server's own words, where it has said something already."""
    try:
        yield
    except RuntimeError as error:  # a worker is gone, or takes too long
        said = f"; the server: {asked.exception()}" if asked.done() and asked.exception() else ""
        raise GroupProblem(f"the process group broke: {error}{said}") from error


def _listen(url: str) -> tuple[str, socket.socket]:
    """Return the address of this machine that a server at `url` can reach, and a socket that listens there alone."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(address)  # sends nothing: the system says which way it would go
        host = str(towards.getsockname()[0])
    listening = socket.create_server((host, 0), family=family, backlog=128)
    return host, listening
