"""AdamW whose states are in host memory, or in 8 bits, and are on the device in fp32 for some elements at a time.

The arithmetic of a step is torch's. States in host memory are exact. In 8 bits (Dettmers et al. 2021, "8-bit Optimizers
via Block-wise Quantization") each block of elements has a scale, and an element a code of a table with more values near
zero; the step itself uses the states before they are rounded. Unlike there, a positive second moment never becomes
zero, which would divide a first moment by epsilon.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

CHUNK = 2**24
"""Elements of a parameter that are stepped at a time; a multiple of BLOCK."""
BLOCK = 256
"""Elements that share a scale."""
SMALLEST = 4096
"""Parameters with fewer elements keep fp32 states: they take no memory to speak of."""
STATES = {"exp_avg": True, "exp_avg_sq": False}
"""AdamW's states, and whether they have a sign."""


class Held(Protocol):
    """A state of a parameter's elements."""

    def load(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return elements [start, stop) in fp32 on a device."""
        ...

    def store(self, start: int, values: Tensor) -> None:
        """Hold new values [count] of the elements from `start` on."""
        ...

    def expanded(self) -> Tensor:
        """Return all elements in fp32, to be read or written; written ones count from `refresh` on."""
        ...

    def refresh(self) -> None:
        """Hold what was written into `expanded`, and release it."""
        ...


class Exact:
    """A state in fp32.

    Args:
        count: number of elements.
        device: where it is held; host memory is pinned if an accelerator copies from it.
        pinned: pin it.
    """

    def __init__(self, count: int, device: torch.device, *, pinned: bool = False) -> None:
        self._values = torch.zeros(count, device=device, pin_memory=pinned)

    def load(self, start: int, stop: int, device: torch.device) -> Tensor:
        return self._values[start:stop].to(device, non_blocking=True)

    def store(self, start: int, values: Tensor) -> None:
        held = self._values[start : start + len(values)]
        if held.data_ptr() != values.data_ptr():
            held.copy_(values, non_blocking=True)

    def expanded(self) -> Tensor:
        return self._values

    def refresh(self) -> None:
        pass


class In8Bits:
    """A state in 8 bits, zero at first; arguments as for `Exact`.

    Args:
        signed: whether values have a sign.
    """

    def __init__(self, count: int, device: torch.device, *, signed: bool, pinned: bool = False) -> None:
        self._signed = signed
        zero = dynamic_table(signed).tolist().index(0.0)
        self._codes = torch.full((count,), zero, dtype=torch.uint8, device=device, pin_memory=pinned)
        self._scales = torch.zeros(-(-count // BLOCK), device=device, pin_memory=pinned)
        self._expanded: Tensor | None = None

    def load(self, start: int, stop: int, device: torch.device) -> Tensor:
        codes, scales = self._codes[start:stop], self._scales[start // BLOCK : -(-stop // BLOCK)]
        codes, scales = (each.to(device, non_blocking=True) for each in (codes, scales))
        values = dynamic_table(self._signed).to(device).index_select(0, codes.int())
        return values.mul_(scales.repeat_interleave(BLOCK)[: len(values)])

    def store(self, start: int, values: Tensor) -> None:
        table = dynamic_table(self._signed).to(values.device)
        blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        # with its sign, since the table has 1 and not -1: coding what was decoded changes nothing
        scales = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)).view(-1)
        relative = (blocks / scales.where(scales != 0, 1.0)[:, None]).view(-1)[: len(values)]
        codes = torch.bucketize(relative, (table[1:] + table[:-1]) / 2, out_int32=True)
        if not self._signed:
            codes.clamp_(min=1).mul_(values > 0)
        self._codes[start : start + len(values)].copy_(codes, non_blocking=True)
        self._scales[start // BLOCK :][: len(scales)].copy_(scales, non_blocking=True)

    def expanded(self) -> Tensor:
        host = torch.device("cpu")
        if self._expanded is None:
            self._expanded = torch.empty(len(self._codes))
            for start, stop in _chunks(len(self._codes)):
                self._expanded[start:stop] = self.load(start, stop, self._codes.device).to(host)
        return self._expanded

    def refresh(self) -> None:
        if self._expanded is not None:
            for start, stop in _chunks(len(self._codes)):
                self.store(start, self._expanded[start:stop].to(self._codes.device))
            self._expanded = None


class HeldAdamW(torch.optim.AdamW):
    """AdamW with states that are held elsewhere between steps; `state` has a `Held` for each.

    Args:
        params: parameter groups.
        on_host: hold states in host memory.
        in_8_bits: hold states in 8 bits.
        options: torch's.
    """

    def __init__(self, params: Any, *, on_host: bool, in_8_bits: bool, **options: Any) -> None:
        super().__init__(params, **options)
        self._on_host = on_host
        self._in_8_bits = in_8_bits

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            local = _local(parameter)
            pinned = self._on_host and local.device.type != "cpu"
            device = torch.device("cpu") if self._on_host else local.device
            small = not self._in_8_bits or local.numel() < SMALLEST
            state["step"] = torch.zeros((), dtype=torch.float32)
            for key, signed in STATES.items():
                count = local.numel()
                state[key] = (
                    Exact(count, device, pinned=pinned)
                    if small
                    else In8Bits(count, device, signed=signed, pinned=pinned)
                )
        return state

    def expanded(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the number of steps, and the states of this rank's elements in their shape; see `Held.expanded`."""
        state, shape = self._state_of(parameter), _local(parameter).shape
        return {"step": state["step"]} | {key: state[key].expanded().view(shape) for key in STATES}

    def refresh(self) -> None:
        """Hold what was written into `expanded` tensors, and release them."""
        for state in self.state.values():
            for key in STATES:
                state[key].refresh()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters that have gradients."""
        assert closure is None, "gradients are computed before"
        self.refresh()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        if self._on_host and torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the host may read its states from now on

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self._state_of(parameter)
        values, gradient = (_local(each).view(-1) for each in (parameter, parameter.grad))
        counter = state["step"].to(values.device if group["fused"] else "cpu")
        for start, stop in _chunks(len(values)):
            first, second = (state[key].load(start, stop, values.device) for key in STATES)
            adamw(
                [values[start:stop]],
                [gradient[start:stop]],
                [first],
                [second],
                [],
                [counter.clone()],
                foreach=group["foreach"],
                fused=group["fused"],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for key, each in zip(STATES, (first, second), strict=True):
                state[key].store(start, each)
        state["step"] += 1


@cache
def dynamic_table(signed: bool) -> Tensor:
    """Return the 256 values of a code, in order: in each of 7 decades twice as many as in the one below."""
    values = [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        means = 10.0 ** (decade - 6) * (bounds[:-1] + bounds[1:]) / 2
        values += means.tolist()
        values += (-means).tolist() if signed else []
    return torch.tensor(sorted(values))


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, CHUNK):
        yield start, min(start + CHUNK, count)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
