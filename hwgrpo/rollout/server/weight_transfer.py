"""The ways on which weights go to a server: a folder that both sides see, or a process group of both.

Rank 0 alone has one. What it took last it can send again, as often as the server forgets it and without the other
ranks: the folder stays, and of what the group carried there is a copy in this host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from hwgrpo.catalog import ENGINES
from hwgrpo.config.schema import Config
from hwgrpo.models.lora import uses_lora
from hwgrpo.rollout.server.http_client import Client, ServerProblem
from hwgrpo.rollout.server.owner import Owner
from hwgrpo.rollout.server.weights_folder import WeightsFolder
from hwgrpo.rollout.server.weights_group import WeightsGroup
from hwgrpo.rollout.vllm.vllm_settings import WEIGHTS_PREFIX, memory_folder, write_adapter
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import WEIGHTS_ROUTE
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.group import Parcel, parcels
from hwgrpo.rollout.weights import AdapterWeights, PolicyWeights
from hwgrpo.scratch import ScratchFolder


def sent_copies(config: Config, engine: str) -> int:
    """Return how many copies of all weights rank 0 holds in its host's memory for a server, at the most.

    A group needs the copy that is sent again. A folder in shared memory has the version before until the server has
    loaded the next. A folder of the user's is no memory, adapters are small, and other engines are sent nothing.

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


class Delivery(Protocol):
    """A way to the server."""

    way: str
    """What it is, in words."""

    def take(self, version: int, weights: PolicyWeights, adapter: AdapterWeights | None) -> None:
        """Take the policy's weights, or its adapter where that alone is trained.

        Raises:
            RunError: there is no room for them.
        """
        ...

    def send(self) -> None:
        """Have the server take what was taken last; what is left of making it is done, however that ends.

        Raises:
            ServerProblem: it did not.
        """
        ...

    def arrived(self) -> None:
        """Let go of what is older than what was taken last."""
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


class FolderDelivery:
    """A folder of files per version; see `Delivery` for the methods.

    Args:
        root: the folder that has them; None: one of its own in this host's memory.
        dtype: of floating-point weights.
        owner: whose weights they are.
        load: has the server load a folder: (folder, version, whether it holds an adapter).
        why: what speaks against a group, in words; empty where nothing else was asked for.
    """

    def __init__(
        self,
        root: str | None,
        dtype: torch.dtype,
        owner: Owner,
        load: Callable[[Path, int, bool], None],
        why: str = "",
    ) -> None:
        self.way = f"a folder: {why}" if why else "a folder"
        self._scratch: ScratchFolder | None = None
        if root is None:
            # Removed with this object, too: a run that fails does not leave a model in memory.
            self._scratch = ScratchFolder(WEIGHTS_PREFIX, memory_folder())
            root = str(self._scratch.path)
        shared = Path(root).expanduser().absolute()
        self._folder: WeightsFolder | None = WeightsFolder(shared, dtype, owner.run, owner.session)
        self._load = load
        self._version, self._adapter = 0, False

    def take(self, version: int, weights: PolicyWeights, adapter: AdapterWeights | None) -> None:
        assert self._folder is not None
        self._version, self._adapter = version, adapter is not None
        if adapter is None:
            self._folder.write(version, weights.whole())
        else:
            self._folder.clear(version)
            write_adapter(adapter, self._folder.folder(version))

    def send(self) -> None:
        assert self._folder is not None
        self._load(self._folder.folder(self._version), self._version, self._adapter)

    def arrived(self) -> None:
        assert self._folder is not None
        self._folder.keep_only(self._version)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None


class GroupDelivery:
    """A process group with the server's workers; see `Delivery` for the methods.

    Args:
        client: of the server.
        owner: whose weights are sent.
        backend: torch.distributed's name of the communication library.
        library: what it is, in words.
        device: that is sent from.
        dtype: of floating-point weights.
        workers: of the server.
        seconds: that a step of anything may take.

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
        self.way = f"a process group over {library}"
        self._client, self._owner, self._device, self._dtype = client, owner, device, dtype
        self._make = lambda: WeightsGroup(client, owner, backend, device, workers, seconds)
        self._group: WeightsGroup | None = self._make()
        self._version = 0
        self._kept: list[Parcel] = []
        self._coming: Iterator[Parcel] = iter(())
        self._seconds = seconds

    def take(self, version: int, weights: PolicyWeights, adapter: AdapterWeights | None) -> None:
        assert adapter is None, "adapters go through folders"
        self._version = version
        self._kept = []
        self._coming = parcels(weights.whole(), self._dtype, self._device)

    def send(self) -> None:
        try:
            if self._group is None or self._told().get("group") != self._group.name:  # it has started anew
                self._leave()
                self._group = self._make()
            try:
                self._group.send(self._parcels(), WEIGHTS_ROUTE, {"version": self._owner.label(self._version)})
            except ServerProblem:
                self._leave()
                raise
        finally:
            for parcel in self._coming:  # other ranks take part in making what is left
                self._keep(parcel)

    def arrived(self) -> None:
        pass

    def close(self) -> None:
        self._leave()
        self._kept = []

    def _parcels(self) -> Iterator[Parcel]:
        """Yield what was taken: what is kept of it, and what is made only now, which is kept on its way."""
        yield from list(self._kept)
        for parcel in self._coming:
            self._keep(parcel)
            yield parcel

    def _keep(self, parcel: Parcel) -> None:
        self._kept.append(Parcel(parcel.contents, parcel.body.cpu()))

    def _told(self) -> dict[str, Any]:
        told, _ = self._client.ask("GET", WEIGHTS_ROUTE, timeout=min(self._seconds, 10.0))
        return told if isinstance(told, dict) else {}

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
