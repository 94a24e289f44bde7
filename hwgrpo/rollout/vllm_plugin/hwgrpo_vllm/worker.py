"""What every worker of the server can do beside vLLM's own: take new weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .group import Group, meeting_point


def load_weights(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give a worker's model new weights, under their names in a Hugging Face checkpoint.

    `model.load_weights` alone will not do: layers have packed their weights, and some have let go of the originals.

    Args:
        worker: a worker of vLLM.
        weights: all of them.
    """
    # vllm-ascend: reformatted weights would be overwritten by plain ones; it says which variable to set.
    check = getattr(worker, "_check_nz_disabled", None)
    if check is not None:
        check()
    with torch.device(worker.device):
        worker.model_runner.reload_weights(weights_iterator=weights)
    for module in worker.model_runner.get_model().modules():
        # On a CPU an LM head tied to the embeddings multiplies with a packed copy, which reloading leaves as it was.
        if hasattr(module, "cpu_linear") and hasattr(module, "quant_method") and module.weight.numel() > 0:
            module.quant_method.process_weights_after_loading(module)


def stored_weights(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a folder of safetensors files, one at a time."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)


class WorkerExtension:
    """Methods that every worker of the server gets (`--worker-extension-cls hwgrpo_vllm.WorkerExtension`)."""

    rank: int
    device: torch.device
    _hwgrpo_group: Group | None = None

    def hwgrpo_load_weights(self, folder: str) -> None:
        """Take the weights of a folder."""
        load_weights(self, stored_weights(folder))

    def hwgrpo_join_group(self, order: Mapping[str, Any]) -> None:
        """Meet the trainer in a group in which it is rank 0; the one before is left.

        Args:
            order: where it waits and what the group is; see `meeting_point` and `Group`.
        """
        self.hwgrpo_leave_group()
        settings = dict(order)
        store = meeting_point(settings.pop("host"), settings.pop("port"), settings["patience"])
        self._hwgrpo_group = Group(store, 1 + self.rank, device=self.device, **settings)

    def hwgrpo_receive_weights(self, number: int) -> None:
        """Take the weights that the trainer sends to the group; the group is left where that fails.

        Args:
            number: of the transfer, counted from the group's beginning.
        """
        group = self._hwgrpo_group
        if group is None:
            raise RuntimeError("this worker is in no group with a trainer")
        weights = group.received(number)
        try:
            try:
                load_weights(self, weights)
            finally:
                for _ in weights:  # what the loader did not want: the trainer sends it all the same
                    pass
        except BaseException:
            self.hwgrpo_leave_group()
            raise

    def hwgrpo_leave_group(self) -> None:
        """Leave the group with the trainer, if there is one."""
        group, self._hwgrpo_group = self._hwgrpo_group, None
        if group is not None:
            group.close()
