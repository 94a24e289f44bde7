"""What an op is (declared once) and what an implementation of one is (registered, and tested by existing)."""

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
    """Largest error allowed against the definition in fp64 on the same inputs.

    `forward` bounds |a - b| / (1 + |b|) elementwise, `backward` bounds ||a - b|| / ||b|| of a whole gradient.
    """

    forward: float
    backward: float


class Key(NamedTuple):
    """All that a choice of implementation may depend on; `shape_class` is V rounded up to a power of two."""

    op: str
    device_type: str
    dtype: torch.dtype
    shape_class: int


def shape_class(vocab: int) -> int:
    """Return the smallest power of two that is at least `vocab`."""
    return 1 << max(0, vocab - 1).bit_length()


@dataclass(frozen=True)
class Op:
    """One operation: its truth, how to make inputs for it, how exact an implementation must be, and what it costs.

    Args:
        name: also the name under `torch.ops.hwgrpo`.
        summary: one line for people.
        definition: plain torch, accumulating in fp32 (fp64 for fp64 inputs), differentiable by autograd: the truth.
        inputs: (shape, dtype, device, case, seed) -> keyword arguments of `definition` and of every implementation.
        outputs: names of the tensors returned, in order.
        differentiable: names of the arguments the op gives gradients to.
        cases: variants `inputs` can make ("plain", "softcap", "offset", ...).
        shapes: sizes the generated tests use.
        tolerance: dtype of the inputs -> `Tolerance`.
        flops, bytes: (shape, dtype) -> work of one forward call.
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


@dataclass(frozen=True)
class Implementation:
    """One way to run an op.

    Args:
        op: name of the op.
        name: what pins and preferences call it ("torch", "triton").
        load: "package.module:attribute" imported on first use, or a function without arguments that returns the
            callable. The callable takes the keyword arguments of the op's definition.
        device_types: torch device types it runs on; None means every one.
        requires: modules that must be installed (looked for, not imported).
        supports: key -> why it cannot run, or None; may read nothing but the key and the state of the machine.
        rank: where no preference says otherwise, the higher one is tried first.
        declines: arguments of a call, given as to the callable -> why this call is left to the next implementation, or
            None; for what the key does not know (an entropy is asked for). Each reason is kept with the choice.
        origin: who brought it; implementations from plug-ins are taken only when named.
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
        """Whether it was written for this torch device type."""
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
            return f"its `supports` raised {type(error).__name__}: {error}"  # somebody else's: the others go on

    def function(self) -> Callable[..., Any]:
        """Import and return the callable."""
        if isinstance(self.load, str):
            module, _, attribute = self.load.partition(":")
            return getattr(importlib.import_module(module), attribute)
        return self.load()


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False
