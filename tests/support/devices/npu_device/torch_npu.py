"""What stands where torch-npu would: `import torch_npu` gives torch a device named npu, and `torch.npu` to run it."""

from __future__ import annotations

from typing import Any

from torch_npu import device_module

npu, _device = device_module.install(
    "torch_npu", kind="npu", chip="Ascend910B3", comm="hccl", visible="ASCEND_RT_VISIBLE_DEVICES"
)


def _autoload() -> None:
    """Called by `import torch`, which imports the modules of the entry-point group torch.backends."""


def __getattr__(name: str) -> Any:
    if not name.startswith("npu_"):  # the fused operators, which transformers imports without calling them
        raise AttributeError(f"the simulated torch_npu has no {name}")

    def absent(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"the simulated torch_npu has no {name}")

    return absent
