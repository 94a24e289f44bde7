"""A device graph without a device: what a recording replays, and what goes wrong in one, shown on the CPU.

The operators of the recorded work are kept with the very tensors they ran on. A replay runs them on these tensors
again, whatever Python variables say by then: a shape, a number or a tensor that Python would have changed is stale, as
it is in a device graph.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select")
"""Operators whose result the host needs before it can go on: no graph holds one."""


class _Keeper(TorchDispatchMode):
    """Keeps the operators that run inside; tensors from outside are held weakly, as device graphs hold addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        self.calls.append((func, tree_map(self._hold, args), tree_map(self._hold, kwargs or {}), outputs))
        known = {id(leaf) for leaf in tree_flatten((args, kwargs))[0]}
        self.made |= {id(output): output for output in outputs if id(output) not in known}
        return result

    def _hold(self, leaf: Any) -> Any:
        return weakref.ref(leaf) if isinstance(leaf, torch.Tensor) and id(leaf) not in self.made else leaf


class ReplayedOnCpu:
    """See `hwgrpo_backends.graphs.Recording`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        work()
        with _Keeper() as keeper:
            self.output = work()
        self._calls = keeper.calls
        self.replays = 0
        self._poison()

    def replay(self) -> None:
        assert self._calls, "the recording was released"
        self.replays += 1
        self._poison()
        for func, args, kwargs, outputs in self._calls:
            results, values = func._schema.returns, (tree_map(_alive, args), tree_map(_alive, kwargs))
            if any(value.alias_info is not None and not value.alias_info.is_write for value in results):
                continue  # a view: it is where it was
            found = func(*values[0], **values[1])
            if any(value.alias_info is not None for value in results):
                continue  # written in place
            for old, new in zip(outputs, tree_flatten(found)[0], strict=True):
                if "empty" in func._schema.name:
                    _spoil(old)
                else:
                    old.copy_(new)

    def release(self) -> None:
        self._calls = []
        self.output = None

    def _poison(self) -> None:
        """Other work may have used a graph's memory between two replays."""
        for func, _, _, outputs in self._calls:
            if all(value.alias_info is None for value in func._schema.returns) and "_unsafe_view" not in str(func):
                for output in outputs:
                    _spoil(output)


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)


def _alive(leaf: Any) -> Any:
    if not isinstance(leaf, weakref.ref):
        return leaf
    tensor = leaf()
    assert tensor is not None, "the recording reads a tensor that is gone: a device would read whatever is there now"
    return tensor


class Recorder:
    """A recorder that remembers what it made."""

    def __init__(self) -> None:
        self.made: list[ReplayedOnCpu] = []

    def __call__(self, work: Callable[[], Any]) -> ReplayedOnCpu:
        self.made.append(ReplayedOnCpu(work))
        return self.made[-1]
