"""Weight transfer to a server through a shared folder or a process group.

Only rank 0 has one. It can send the last weights again, without the other ranks, whenever the server has lost them: the
folder stays, and of the weights sent through the group a copy is kept in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from hwgrpo.catalog import ENGINES
from hwgrpo.config.schema import Config
from hwgrpo.models.lora import uses_lora
from hwgrpo.rollout.policy_weights import AdapterWeights, PolicyWeights
from hwgrpo.rollout.server.http_client import Client, ServerProblem
from hwgrpo.rollout.server.server_owner import Owner
from hwgrpo.rollout.server.weights_folder import WeightsFolder
from hwgrpo.rollout.server.weights_group import WeightsGroup
from hwgrpo.rollout.vllm.vllm_settings import WEIGHTS_PREFIX, shared_memory_folder, write_adapter
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import WEIGHTS_ROUTE
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.group import WeightBucket, make_buckets
from hwgrpo.scratch import ScratchFolder


def count_host_copies(config: Config, engine: str) -> int:
    """Return the peak number of full copies of the weights that rank 0 holds in host memory for a server.

    A group needs one copy for sending again. A folder in shared memory keeps the previous version until the server has
    loaded the next. A folder of the user's takes no memory, adapters are small, and other engines are sent nothing.

    Args:
        config: the run's settings.
        engine: a name of `rollout.engine`.
    """
    server = config.rollout.server
    kind = ENGINES.load(engine)
    in_files = not kind.receives_in_group or server.transfer == "folder"
    if not kind.on_server or uses_lora(config.model.lora) or server.weights_dir is not None:
        return 0
    return 2 if in_files else 1


class WeightTransfer(Protocol):
    """Protocol of a transfer of weights to the server."""

    description: str
    """What it is, for the startup notes."""

    def prepare(self, version: int, weights: PolicyWeights, adapter: AdapterWeights | None) -> None:
        """Prepare a version: the policy's weights, or only its adapter where only that is trained.

        Raises:
            RunError: there is no space for them.
        """
        ...

    def send(self) -> None:
        """Have the server load the prepared version; gathering is completed even if that fails.

        Raises:
            ServerProblem: the server did not load it.
        """
        ...

    def discard_old(self) -> None:
        """Discard all versions but the prepared one."""
        ...

    def close(self) -> None:
        """Remove all files and leave the group."""
        ...


class FolderTransfer:
    """Transfer by a folder of files per version; see `WeightTransfer` for the methods.

    Args:
        root: the folder; None: a scratch folder in this host's memory.
        dtype: dtype of floating-point weights.
        owner: owner of the weights.
        load: has the server load a folder: (folder, version, whether it is an adapter).
        reason: why no group is used; empty where a folder was configured.
    """

    def __init__(
        self,
        root: str | None,
        dtype: torch.dtype,
        owner: Owner,
        load: Callable[[Path, int, bool], None],
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
        self._version, self._adapter = 0, False

    def prepare(self, version: int, weights: PolicyWeights, adapter: AdapterWeights | None) -> None:
        assert self._folder is not None
        self._version, self._adapter = version, adapter is not None
        if adapter is None:
            self._folder.write(version, weights.full())
        else:
            self._folder.clear(version)
            write_adapter(adapter, self._folder.folder(version))

    def send(self) -> None:
        assert self._folder is not None
        self._load(self._folder.folder(self._version), self._version, self._adapter)

    def discard_old(self) -> None:
        assert self._folder is not None
        self._folder.keep_only(self._version)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None


class GroupTransfer:
    """Transfer by a process group with the server's workers; see `WeightTransfer` for the methods.

    Args:
        client: client of the server.
        owner: owner of the weights.
        backend: torch.distributed's name of the communication library.
        library: its name and version, for messages.
        device: device to send from.
        dtype: dtype of floating-point weights.
        workers: number of the server's workers.
        seconds: timeout of each step.

    Raises:
        ServerProblem: the group could not be made.
    """

    def __init__(
        self,
        client: Client,
        owner: Owner,
        *,
        backend: str,
        library: str,
        device: torch.device,
        dtype: torch.dtype,
        workers: int,
        seconds: float,
    ) -> None:
        self.description = f"a process group over {library}"
        self._client, self._owner, self._device, self._dtype = client, owner, device, dtype
        self._make = lambda: WeightsGroup(client, owner, backend, device, workers, seconds)
        self._group: WeightsGroup | None = self._make()
        self._version = 0
        self._made: list[WeightBucket] = []
        self._unmade: Iterator[WeightBucket] = iter(())
        self._seconds = seconds

    def prepare(self, version: int, weights: PolicyWeights, adapter: AdapterWeights | None) -> None:
        assert adapter is None, "adapters go through folders"
        self._version = version
        self._made = []
        self._unmade = make_buckets(weights.full(), self._dtype, self._device)

    def send(self) -> None:
        try:
            if self._group is None or self._status().get("group") != self._group.name:  # the server was restarted
                self._leave_group()
                self._group = self._make()
            try:
                self._group.send(self._buckets(), WEIGHTS_ROUTE, {"version": self._owner.label(self._version)})
            except ServerProblem:
                self._leave_group()
                raise
        finally:
            for bucket in self._unmade:  # other ranks take part in gathering the rest
                self._keep(bucket)

    def discard_old(self) -> None:
        pass

    def close(self) -> None:
        self._leave_group()
        self._made = []

    def _buckets(self) -> Iterator[WeightBucket]:
        """Yield all buckets: the kept ones, then those made now, which are kept too."""
        yield from list(self._made)
        for bucket in self._unmade:
            self._keep(bucket)
            yield bucket

    def _keep(self, bucket: WeightBucket) -> None:
        self._made.append(WeightBucket(bucket.contents, bucket.body.cpu()))

    def _status(self) -> dict[str, Any]:
        status, _ = self._client.request("GET", WEIGHTS_ROUTE, timeout=min(self._seconds, 10.0))
        return status if isinstance(status, dict) else {}

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
