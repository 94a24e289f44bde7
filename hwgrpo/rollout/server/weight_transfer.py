"""Weight transfer to the servers through a shared folder or process groups.

Only rank 0 has one. A version is prepared once, in the thread that takes part in gathering it, and sent to each server,
again whenever a server has lost it: the folder stays, and of weights sent through groups a copy is kept in host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from hwgrpo.catalog import ENGINES
from hwgrpo.config.schema import LoraConfig, RolloutServerConfig
from hwgrpo.models.lora import uses_lora
from hwgrpo.rollout.policy_weights import AdapterWeights, PolicyWeights
from hwgrpo.rollout.server.http_client import Client, InvalidResponse, ServerProblem
from hwgrpo.rollout.server.server_owner import Owner
from hwgrpo.rollout.server.weights_folder import DamagedWeights, WeightsFolder
from hwgrpo.rollout.server.weights_group import WeightsGroup
from hwgrpo.rollout.vllm.vllm_settings import WEIGHTS_PREFIX, shared_memory_folder, write_adapter
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import WEIGHTS_ROUTE
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.group import WeightBucket, make_buckets
from hwgrpo.support.scratch import ScratchFolder
from hwgrpo.support.waits import STUCK_AFTER


def count_host_copies(engine: str, server: RolloutServerConfig, lora: LoraConfig) -> int:
    """Return the peak number of full copies of the weights that rank 0 holds in host memory for a server.

    A group needs one copy for sending again. A folder in shared memory keeps the previous version until the server has
    loaded the next. A folder of the user's takes no memory, adapters are small, and other engines are sent nothing.

    Args:
        engine: a name of `rollout.engine`.
        server: settings of its server.
        lora: the policy's adapters.
    """
    kind = ENGINES.load(engine)
    in_files = not kind.receives_in_group or server.transfer == "folder"
    if not kind.on_server or uses_lora(lora) or server.weights_dir is not None:
        return 0
    return 2 if in_files else 1


class WeightTransfer(Protocol):
    """Protocol of a transfer of weights to the servers."""

    description: str
    """What it is, for the startup notes."""

    def prepare(self, version: int, weights: PolicyWeights, adapter: AdapterWeights | None) -> None:
        """Prepare a version: the policy's weights, or only its adapter where only that is trained.

        Raises:
            RunError: there is no space for them.
        """
        ...

    def send(self, client: Client) -> None:
        """Have a server load the prepared version; several threads may send to a server each.

        In the thread that prepared it gathering is completed even if that fails.

        Raises:
            ServerProblem: the server did not load it.
            DamagedWeights: it has changed where it is kept. Preparing it again mends that.
        """
        ...

    def finish(self) -> None:
        """Complete the gathering of the prepared version in the thread that prepared it."""
        ...

    def discard_old(self) -> None:
        """Discard all versions but the prepared one."""
        ...

    def close(self) -> None:
        """Remove all files and leave all groups."""
        ...


class FolderTransfer:
    """Transfer by a folder of files per version; see `WeightTransfer` for the methods.

    Args:
        root: the folder; None: a scratch folder in this host's memory.
        dtype: dtype of floating-point weights.
        owner: owner of the weights.
        load: has a server load a folder: (client, folder, version, whether it is an adapter).
        reason: why no group is used; empty where a folder was configured.
    """

    def __init__(
        self,
        root: str | None,
        dtype: torch.dtype,
        owner: Owner,
        load: Callable[[Client, Path, int, bool], None],
        reason: str = "",
    ) -> None:
        self.description = f"a folder: {reason}" if reason else "a folder"
        self._scratch: ScratchFolder | None = None
        if root is None:
            # Removed with this object, too: a run that fails does not leave a model in memory.
            self._scratch = ScratchFolder(WEIGHTS_PREFIX, shared_memory_folder())
            root = str(self._scratch.path)
        shared = Path(root).expanduser().absolute()
        self._folder: WeightsFolder | None = WeightsFolder(shared, dtype, owner.run, owner.session)
        self._load = load
        self._prepared = 0, False
        self._asked: set[Client] = set()
        """Servers that were asked to load the prepared version."""

    def prepare(self, version: int, weights: PolicyWeights, adapter: AdapterWeights | None) -> None:
        assert self._folder is not None
        if adapter is None:
            self._folder.write(version, weights.full())
        else:
            self._folder.clear(version)
            write_adapter(adapter, self._folder.folder(version))
        self._prepared = version, adapter is not None
        self._asked = set()

    def send(self, client: Client) -> None:
        assert self._folder is not None
        version, is_adapter = self._prepared
        if client in self._asked:
            self._check(version)
        self._asked.add(client)
        try:
            self._load(client, self._folder.folder(version), version, is_adapter)
        except InvalidResponse:  # it refused the files, for their damage or for another reason
            self._check(version)
            raise

    def finish(self) -> None:
        pass

    def discard_old(self) -> None:
        assert self._folder is not None
        self._folder.keep_only(self._prepared[0])

    def close(self) -> None:
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    def _check(self, version: int) -> None:
        """Check the files of a version.

        Raises:
            DamagedWeights: a file is not as it was written.
            ServerProblem: a newer version has replaced them.
        """
        assert self._folder is not None
        try:
            self._folder.check(version)
        except DamagedWeights as error:
            if self._prepared[0] == version:
                raise
            raise ServerProblem(f"weights {version} were replaced by newer ones meanwhile") from error


class GatheredWeights:
    """A version of the weights, of which a copy is kept in host memory while it is gathered.

    Args:
        version: the version.
        buckets: its buckets; the thread that makes this object takes part in gathering them.
    """

    def __init__(self, version: int, buckets: Iterator[WeightBucket]) -> None:
        self.version = version
        self.made: list[WeightBucket] = []
        self._unmade = self._gather(buckets)
        self._thread = threading.get_ident()
        self._over = threading.Event()
        self._complete = False

    @property
    def is_gathered_here(self) -> bool:
        """Whether the calling thread takes part in gathering."""
        return threading.get_ident() == self._thread

    def buckets(self) -> Iterator[WeightBucket]:
        """Yield all buckets; the thread that gathers them yields each when it is made, other threads wait for all.

        Raises:
            ServerProblem: in another thread, if gathering failed.
        """
        if not self.is_gathered_here and not (self._over.wait(STUCK_AFTER) and self._complete):
            raise ServerProblem("the weights were not gathered")
        yield from list(self.made)
        while (bucket := next(self._unmade, None)) is not None:  # `yield from` ends the gathering if a send fails
            yield bucket

    def finish(self) -> None:
        """Gather the rest, as the other ranks do."""
        try:
            for _ in self._unmade:
                pass
        finally:
            self._over.set()

    def _gather(self, buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
        for bucket in buckets:
            self.made.append(WeightBucket(bucket.contents, bucket.body.cpu()))
            yield bucket
        self._complete = True


class GroupTransfer:
    """Transfer by a process group with each server's workers; see `WeightTransfer` for the methods.

    Args:
        workers: the number of workers of each server.
        owner: owner of the weights.
        backend: torch.distributed's name of the communication library.
        library: its name and version, for messages.
        device: device to send from.
        dtype: dtype of floating-point weights.
        seconds: timeout of each step.

    Raises:
        ServerProblem: a group could not be made.
    """

    def __init__(
        self,
        workers: Mapping[Client, int],
        owner: Owner,
        *,
        backend: str,
        library: str,
        device: torch.device,
        dtype: torch.dtype,
        seconds: float,
    ) -> None:
        self.description = f"a process group over {library}"
        self._owner, self._device, self._dtype, self._seconds = owner, device, dtype, seconds
        self._make = lambda client: WeightsGroup(client, owner, backend, device, workers[client], seconds)
        self._groups: dict[Client, WeightsGroup] = {}
        self._prepared = GatheredWeights(0, iter(()))
        try:
            for client in workers:
                self._groups[client] = self._make(client)
        except ServerProblem:
            self.close()
            raise

    def prepare(self, version: int, weights: PolicyWeights, adapter: AdapterWeights | None) -> None:
        assert adapter is None, "adapters go through folders"
        self._prepared = GatheredWeights(version, make_buckets(weights.full(), self._dtype, self._device))

    def send(self, client: Client) -> None:
        prepared, group = self._prepared, self._groups.get(client)
        try:
            if group is None or self._status(client).get("group") != group.name:  # the server was restarted
                self._leave_group(client)
                group = self._groups[client] = self._make(client)
            try:
                group.send(prepared.buckets(), WEIGHTS_ROUTE, {"version": self._owner.label(prepared.version)})
            except ServerProblem:
                self._leave_group(client)
                raise
        finally:
            if prepared.is_gathered_here:
                prepared.finish()

    def finish(self) -> None:
        self._prepared.finish()

    def discard_old(self) -> None:
        pass

    def close(self) -> None:
        for client in [*self._groups]:
            self._leave_group(client)
        self._prepared = GatheredWeights(0, iter(()))

    def _status(self, client: Client) -> dict[str, Any]:
        status, _ = client.request("GET", WEIGHTS_ROUTE, timeout=min(self._seconds, 10.0))
        return status if isinstance(status, dict) else {}

    def _leave_group(self, client: Client) -> None:
        group = self._groups.pop(client, None)
        if group is not None:
            group.close()
