"""Regions in which the streaming loss raises, and the precision it runs in."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype_of(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the head's GEMMs: autocast's where it is on (as for `F.linear`), else that of `hidden`."""
    device_type = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return hidden.dtype


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context in which autocast is off; the dtypes of the head are set explicitly."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def refuse_compiled_region(name: str) -> None:
    """Raise RuntimeError while torch.compile traces."""
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{name} is eager: compile the backbone and call {name} outside of the compiled region")


def refuse_checkpointed_region(name: str) -> None:
    """Raise RuntimeError inside activation checkpointing, which would run the head and its backward twice.

    Non-reentrant checkpointing is detected by its hooks on saved tensors, reentrant by a forward inside a backward.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    checkpointed = hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
    if checkpointed or torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"{name} computes its gradients in the forward and keeps no activations, so checkpointing only repeats its "
            f"work: checkpoint the backbone's layers and call {name} outside"
        )
