"""The declaration of an op, and of an implementation; registering one also adds it to the tests."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

BUILT_IN = "built in"


class Shape(NamedTuple):
    """Problem size: N rows, H hidden units, V vocabulary entries (row ops ignore H)."""

    N: int
    H: int
    V: int


class Tolerance(NamedTuple):
    """Largest allowed error against the definition in fp64 on the same inputs.

    `forward` bounds |a - b| / (1 + |b|) elementwise, `backward` bounds ||a - b|| / ||b|| of a full gradient.
    """

    forward: float
    backward: float


class Key(NamedTuple):
    """The inputs of selecting an implementation; `shape_class` is V rounded up to a power of two."""

    op: str
    device_type: str
    dtype: torch.dtype
    shape_class: int


def shape_class(vocab: int) -> int:
    """Return the smallest power of two that is at least `vocab`."""
    return 1 << max(0, vocab - 1).bit_length()


@dataclass(frozen=True)
class Op:
    """One operation: definition, test inputs, tolerances of implementations, and cost.

    Args:
        name: also the name under `torch.ops.hwgrpo`.
        summary: one readable line.
        definition: plain torch, accumulating in fp32 (fp64 for fp64 inputs), differentiable by autograd.
        inputs: (shape, dtype, device, case, seed) -> keyword arguments of `definition` and of every implementation.
        outputs: names of the tensors returned, in order.
        differentiable: names of the arguments the op gives gradients to.
        cases: variants `inputs` can make ("plain", "softcap", "offset", ...).
        shapes: sizes the generated tests use.
        tolerance: dtype of the inputs -> `Tolerance`.
        flops, bytes: (shape, dtype) -> work of one forward call.
        written: names of the arguments that it writes in place, besides an `out`.
    """

    name: str
    summary: str
    definition: Callable[..., Any]
    inputs: Callable[..., dict[str, Any]]
    outputs: tuple[str, ...]
    differentiable: tuple[str, ...]
    cases: tuple[str, ...]
    shapes: tuple[Shape, ...]
    tolerance: Mapping[torch.dtype, Tolerance]
    flops: Callable[[Shape, torch.dtype], int]
    bytes: Callable[[Shape, torch.dtype], int]
    written: tuple[str, ...] = ()


@dataclass(frozen=True)
class Implementation:
    """One way to run an op.

    Args:
        op: name of the op.
        name: its name in pins and preferences ("torch", "triton").
        load: "package.module:attribute" imported on first use, or a function without arguments that returns the
            callable. The callable takes the keyword arguments of the op's definition.
        device_types: torch device types it runs on; None: all.
        requires: modules that must be installed (looked for, not imported).
        supports: key -> why it cannot run, or None; may depend only on the key and the machine.
        rank: without a preference, higher ranks are tried first.
        declines: arguments of a call -> why the call falls back to the next implementation, or None; for conditions
            that the key lacks (e.g. an entropy is requested). `Choice.declined` counts each reason.
        origin: built in, or the plug-in; a plug-in's implementations are used only when named.
    """

    op: str
    name: str
    load: str | Callable[[], Callable[..., Any]]
    device_types: frozenset[str] | None = None
    requires: tuple[str, ...] = ()
    supports: Callable[[Key], str | None] | None = None
    rank: int = 0
    declines: Callable[..., str | None] | None = None
    origin: str = BUILT_IN

    def is_for(self, device_type: str) -> bool:
        """Return whether it runs on this torch device type."""
        return self.device_types is None or device_type in self.device_types

    def reason_against(self, key: Key) -> str | None:
        """Return why this implementation cannot run for `key`, or None when it can."""
        if self.device_types is not None and not self.is_for(key.device_type):
            return f"needs {' or '.join(sorted(self.device_types))}, have {key.device_type}"
        for module in self.requires:
            if not _is_installed(module):
                return f"needs module {module!r}, which is not installed"
        try:
            return self.supports(key) if self.supports is not None else None
        except Exception as error:
            if self.origin == BUILT_IN:
                raise
            return f"its `supports` raised {type(error).__name__}: {error}"  # a plug-in's: try the next

    def function(self) -> Callable[..., Any]:
        """Import and return the callable."""
        if isinstance(self.load, str):
            module, _, attribute = self.load.partition(":")
            return getattr(importlib.import_module(module), attribute)
        return self.load()


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
