"""Worker extension of the server: loads new weights from a folder or a process group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .checksum import check
from .group import Group, connect_store


def load_weights(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load new weights, named as in a Hugging Face checkpoint, into a worker's model.

    `model.load_weights` is not enough: layers have packed their weights, and some have freed the originals.

    Args:
        worker: a vLLM worker.
        weights: all weights of the model.
    """
    # vllm-ascend: reformatted weights would be overwritten by plain ones; this check says which variable to set.
    check = getattr(worker, "_check_nz_disabled", None)
    if check is not None:
        check()
    with torch.device(worker.device):
        worker.model_runner.reload_weights(weights_iterator=weights)
    for module in worker.model_runner.get_model().modules():
        # On a CPU an LM head tied to the embeddings multiplies with a packed copy, which reloading does not update.
        if hasattr(module, "cpu_linear") and hasattr(module, "quant_method") and module.weight.numel() > 0:
            module.quant_method.process_weights_after_loading(module)


def read_weights(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a folder of safetensors files, one at a time.

    Raises:
        ChecksumError: one of them is not as it was written.
    """
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            checksums = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118  (not a dict)
                tensor = file.get_tensor(name)
                check([name], [tensor], [checksums.get(name)])
                yield name, tensor


def check_files(folder: str) -> None:
    """Check the weights in the files of a folder by their checksums.

    Raises:
        ChecksumError: one of them is not as it was written.
    """
    for _ in read_weights(folder):
        pass


class WorkerExtension:
    """Methods that every worker of the server gets (`--worker-extension-cls hwgrpo_vllm.WorkerExtension`)."""

    rank: int
    device: torch.device
    _hwgrpo_group: Group | None = None

    def hwgrpo_load_weights(self, folder: str) -> None:
        """Load the weights of a folder."""
        load_weights(self, read_weights(folder))

    def hwgrpo_check_files(self, folder: str) -> None:
        """Check the adapter in a folder before it is loaded."""
        check_files(folder)

    def hwgrpo_join_group(self, body: Mapping[str, Any]) -> None:
        """Join a group whose rank 0 is the trainer, after leaving the previous one.

        Args:
            body: arguments of `connect_store` and `Group`, by name.
        """
        self.hwgrpo_leave_group()
        settings = dict(body)
        store = connect_store(settings.pop("host"), settings.pop("port"), settings["patience"])
        self._hwgrpo_group = Group(store, 1 + self.rank, device=self.device, **settings)

    def hwgrpo_receive_weights(self, number: int) -> None:
        """Load the weights that the trainer sends through the group; leave the group on failure.

        Args:
            number: number of the transfer in this group, from 0.
        """
        group = self._hwgrpo_group
        if group is None:
            raise RuntimeError("this worker is in no group with a trainer")
        weights = group.receive(number)
        try:
            try:
                load_weights(self, weights)
            finally:
                for _ in weights:  # weights that the loader did not read: the trainer broadcasts them all the same
                    pass
        except BaseException:
            self.hwgrpo_leave_group()
            raise

    def hwgrpo_leave_group(self) -> None:
        """Leave the group with the trainer, if there is one."""
        group, self._hwgrpo_group = self._hwgrpo_group, None
        if group is not None:
            group.close()
