"""A ledger of the kernels that code would launch on an accelerator: counted on tensors of the meta device, none run.

ledger = KernelLedger(rates)
with ledger.counting(backend), ledger.stage("forward"):
    model(ids)                                  # whose parameters are on the meta device
ledger.stages["forward"].kernels
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from hwgrpo_backends import Backend
from hwgrpo_kernels import default_registry
from hwgrpo_kernels.kernel_launches import KernelLaunch, recorded_launches, tensor_bytes
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hwgrpo.bench.ledger import kernel_costs
from hwgrpo.bench.ledger.kernel_costs import Rates
from hwgrpo.bench.ledger.meta_accelerator import MetaAccelerator, seen_as_accelerator
from hwgrpo.errors import ConfigError

PROCESSORS = 132
"""Processors of the chip: those of an H100 SXM. Persistent kernels launch as many programs, which changes no count."""


@dataclass
class Work:
    """Kernels of one class, or of several."""

    kernels: int = 0
    bytes: int = 0
    """Read and written."""
    flops: int = 0
    """Of matrix products and attention."""
    seconds: float = 0.0
    """Modelled."""

    def add(self, other: Work, times: int = 1) -> None:
        """Add another's, several times."""
        self.kernels += times * other.kernels
        self.bytes += times * other.bytes
        self.flops += times * other.flops
        self.seconds += times * other.seconds


@dataclass
class Stage:
    """What a stage of a step launched, in all of its runs."""

    runs: int = 0
    waits: int = 0
    """Times that the host read values of the device, for which it waits."""
    uploads: int = 0
    """Copies of host tensors to the device."""
    classes: dict[str, Work] = field(default_factory=dict)
    """Operation or Triton kernel -> its work."""

    @property
    def total(self) -> Work:
        """The work of all classes."""
        total = Work()
        for work in self.classes.values():
            total.add(work)
        return total

    @property
    def kernels(self) -> Counter[str]:
        """The number of kernels of each class that has some."""
        return Counter({name: work.kernels for name, work in self.classes.items()})

    def add(self, other: Stage) -> None:
        """Add the kernels of another stage, as replaying its recording launches them."""
        for name, work in other.classes.items():
            self.classes.setdefault(name, Work()).add(work)


class KernelLedger(TorchDispatchMode):
    """Counts what is launched within `counting`, in the innermost `stage`; outside of stages nothing is counted."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        self.rates = rates
        self.stages: dict[str, Stage] = {}
        self._open: list[Stage] = []
        self._sealed = False

    @contextmanager
    def counting(self, backend: Backend) -> Iterator[torch.device]:
        """Let tensors of the meta device be the backend's within the block; yield the device they claim to be on.

        Raises:
            ConfigError: the Triton kernels cannot be selected here.
        """
        device = torch.device(backend.device_type, 0)
        self._accelerator = MetaAccelerator(device, self._count_wait, self._count_upload, self._count_torch_kernel)
        with default_registry.restored():
            default_registry.configure(preference=backend.kernels)
            choice = default_registry.resolve("row_stats", device.type, torch.bfloat16, 1)
            if choice.name != "triton":
                raise ConfigError(f"a ledger counts Triton kernels, which cannot be selected here: {choice.line}")
            with (
                recorded_launches(self._count_launch, arch=self.rates.arch, processors=PROCESSORS),
                seen_as_accelerator(self._accelerator),
                self,
            ):
                yield device

    @contextmanager
    def stage(self, name: str, *, sealed: bool = False) -> Iterator[Stage]:
        """Count in a stage within the block.

        Args:
            name: of the stage.
            sealed: stages within the block count in this one.
        """
        if self._sealed:
            yield self._open[-1]
            return
        stage = self.stages.setdefault(name, Stage())
        stage.runs += 1
        with self._counting_in(stage, sealed):
            yield stage

    @contextmanager
    def apart(self) -> Iterator[Stage]:
        """Count all of the block in a stage that is not among `stages`."""
        with self._counting_in(Stage(), True) as stage:
            yield stage

    @contextmanager
    def _counting_in(self, stage: Stage, sealed: bool) -> Iterator[Stage]:
        before = self._sealed
        self._open.append(stage)
        self._sealed = sealed
        try:
            yield stage
        finally:
            self._sealed = before
            self._open.pop()

    def staged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls are runs of a stage."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return function(*args, **kwargs)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "hwgrpo":  # an op of ours, whose fake kernel would launch nothing
            with self._accelerator, self:
                return OPDEFS[func.name()]._init_fn(*args, **kwargs)
        # products into fp32 have no kernel on the meta device
        out = kwargs["out"] if func._overloadname == "dtype_out" else func(*args, **kwargs)
        if self._open and func.namespace == "aten":
            self._count_operation(func, args, kwargs, out)
        return out

    def _count_operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func.overloadpacket.__name__
        declared = func._schema.arguments
        values = dict(zip((argument.name for argument in declared), args)) | kwargs
        read = [values.get(each.name) for each in declared if not each.is_out]
        unwritten = kernel_costs.UNWRITTEN.get(name, ())
        written = [values.get(each.name) for each in declared if _is_written(each) and each.name not in unwritten]
        # views, and operations in place, return no tensor of their own
        made = out if all(each.alias_info is None for each in func._schema.returns) else ()
        inputs, outputs = _on_device(read), _on_device((written, made))
        kernels = kernel_costs.kernels_of(name, args)
        if not kernels or not any(each.numel() for each in outputs):
            return
        if name in kernel_costs.READS_AS_MUCH_AS_IT_WRITES:
            inputs = [*outputs, *inputs[1:]]
        elif name in kernel_costs.WRITES_AS_MUCH_AS_IT_READS:
            inputs, outputs = inputs[1:], inputs[-1:]
        elif name in kernel_costs.WRITES_ONLY:
            inputs = inputs[1:]
        self._count(name, kernels, inputs, outputs, _flops(func, args, kwargs, out))

    def _count(self, name: str, kernels: int, inputs: list[Tensor], outputs: list[Tensor], flops: int) -> None:
        count = sum(map(tensor_bytes, (*inputs, *outputs)))
        dtype = inputs[1].dtype if flops else torch.float32  # of an operand: a sum of products may come first
        self._add(name, Work(kernels, count, flops, self.rates.seconds(kernels, count, flops, dtype)))

    def _add(self, name: str, work: Work) -> None:
        if self._open:
            self._open[-1].classes.setdefault(name, Work()).add(work)

    def _count_launch(self, launch: KernelLaunch) -> None:
        count, flops = launch.work
        seconds = self.rates.seconds(1, count, flops, torch.bfloat16)
        self._add(launch.name, Work(1, count, flops, seconds))

    def _count_torch_kernel(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self._count(name, kernel_costs.KERNELS.get(name, 1), inputs, outputs, 0)

    def _count_wait(self) -> None:
        if self._open:
            self._open[-1].waits += 1

    def _count_upload(self) -> None:
        if self._open:
            self._open[-1].uploads += 1


def _on_device(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor) and each.is_meta]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of a matrix product or of attention, 0 of others; causal attention has half of them."""
    # a product added in place has the FLOPs of one that is not
    packet = getattr(torch.ops.aten, func.overloadpacket.__name__.removesuffix("_"), func.overloadpacket)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    operands = [each for each in args if not isinstance(each, torch.dtype)]
    flops = formula(*operands, out_val=out)
    named = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
    return flops // 2 if named.get("is_causal") else flops
