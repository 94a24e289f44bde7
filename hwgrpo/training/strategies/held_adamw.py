"""AdamW whose states are in host memory, or in 8 bits, and are on the device in fp32 for some elements at a time.

The arithmetic of a step is torch's. States in host memory are exact. In 8 bits (Dettmers et al. 2021, "8-bit Optimizers
via Block-wise Quantization") each block of elements has a scale, and an element a code of a table with more values near
zero; the step itself uses the states before they are rounded. Unlike there, a positive second moment never becomes
zero, which would divide a first moment by epsilon.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from itertools import cycle
from typing import Any, Protocol

import torch
from hwgrpo_backends.device import runtime
from torch import Tensor
from torch.optim.adamw import adamw

from hwgrpo.training.strategies import pinned_memory
from hwgrpo.training.strategies.host_gradients import HostGradients, chunks, local
from hwgrpo.training.strategies.pinned_memory import Part

BLOCK = 256
"""Elements that share a scale; a divisor of CHUNK."""
SMALLEST = 4096
"""Parameters with fewer elements keep fp32 states: they take no memory to speak of."""
STATES = {"exp_avg": True, "exp_avg_sq": False}
"""AdamW's states, and whether they have a sign."""
STREAMS = 2
"""Streams that chunks of states in host memory take turns on: one is copied in while another is copied out."""


class Held(Protocol):
    """A state of a parameter's elements."""

    def load(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return elements [start, stop) in fp32 on a device."""
        ...

    def store(self, start: int, values: Tensor) -> None:
        """Hold new values [count] of the elements from `start` on."""
        ...

    def read(self) -> Tensor:
        """Return all elements in fp32, not to be written: those that are held, or a copy in host memory."""
        ...

    def expanded(self) -> Tensor:
        """Return all elements in fp32, to be written; written ones count from `refresh` on."""
        ...

    def refresh(self) -> None:
        """Hold what was written into `expanded`, and release it."""
        ...


class Exact:
    """A state in fp32, zero at first.

    Args:
        values: memory of it, [count] fp32.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values.zero_()

    @staticmethod
    def parts(count: int) -> list[Part]:
        """Return the tensors that hold a state of `count` elements."""
        return [(count, torch.float32)]

    def load(self, start: int, stop: int, device: torch.device) -> Tensor:
        return self._values[start:stop].to(device, non_blocking=True)

    def store(self, start: int, values: Tensor) -> None:
        held = self._values[start : start + len(values)]
        if held.data_ptr() != values.data_ptr():
            held.copy_(values, non_blocking=True)

    def read(self) -> Tensor:
        return self._values

    def expanded(self) -> Tensor:
        return self._values

    def refresh(self) -> None:
        pass


class In8Bits:
    """A state in 8 bits, zero at first.

    Args:
        codes: memory of the codes, [count] uint8.
        scales: memory of the blocks' scales, fp32.
        signed: whether values have a sign.
    """

    def __init__(self, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
        self._signed = signed
        self._codes = codes.fill_(dynamic_table(signed).tolist().index(0.0))
        self._scales = scales.zero_()
        self._expanded: Tensor | None = None

    @staticmethod
    def parts(count: int) -> list[Part]:
        """Return the tensors that hold a state of `count` elements."""
        return [(count, torch.uint8), (-(-count // BLOCK), torch.float32)]

    def load(self, start: int, stop: int, device: torch.device) -> Tensor:
        codes, scales = self._codes[start:stop], self._scales[start // BLOCK : -(-stop // BLOCK)]
        codes, scales = (each.to(device, non_blocking=True) for each in (codes, scales))
        values = dynamic_table(self._signed, device).index_select(0, codes.int())
        return values.mul_(scales.repeat_interleave(BLOCK)[: len(values)])

    def store(self, start: int, values: Tensor) -> None:
        table = dynamic_table(self._signed, values.device)
        blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        # with its sign, since the table has 1 and not -1: coding what was decoded changes nothing
        scales = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)).view(-1)
        relative = (blocks / scales.where(scales != 0, 1.0)[:, None]).view(-1)[: len(values)]
        codes = torch.bucketize(relative, (table[1:] + table[:-1]) / 2, out_int32=True)
        if not self._signed:
            codes.clamp_(min=1).mul_(values > 0)
        self._codes[start : start + len(values)].copy_(codes, non_blocking=True)
        self._scales[start // BLOCK :][: len(scales)].copy_(scales, non_blocking=True)

    def read(self) -> Tensor:
        values = torch.empty(len(self._codes))
        for start, stop in chunks(len(values)):
            values[start:stop] = self.load(start, stop, self._codes.device).cpu()
        return values

    def expanded(self) -> Tensor:
        if self._expanded is None:
            self._expanded = self.read()
        return self._expanded

    def refresh(self) -> None:
        if self._expanded is not None:
            for start, stop in chunks(len(self._codes)):
                self.store(start, self._expanded[start:stop].to(self._codes.device))
            self._expanded = None


class HeldAdamW(torch.optim.AdamW):
    """AdamW with states that are held elsewhere between steps; `state` has a `Held` for each.

    Args:
        params: parameter groups.
        on_host: hold states in host memory.
        in_8_bits: hold states in 8 bits.
        gradients_on_host: sum gradients in host memory.
        options: torch's.
    """

    def __init__(
        self, params: Any, *, on_host: bool, in_8_bits: bool, gradients_on_host: bool = False, **options: Any
    ) -> None:
        super().__init__(params, **options)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.host_gradients = HostGradients(parameters) if gradients_on_host else None
        self._on_host = on_host
        self._in_8_bits = in_8_bits

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        if not self.state[parameter]:
            self._hold_zeros()
        return self.state[parameter]

    def _hold_zeros(self) -> None:
        """Hold states of zero for all parameters."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        kinds = [In8Bits if self.in_8_bits(parameter) else Exact for parameter in parameters]
        device = local(parameters[0]).device
        parts = [
            part
            for parameter, kind in zip(parameters, kinds, strict=True)
            for _ in STATES
            for part in kind.parts(local(parameter).numel())
        ]
        if self._on_host and device.type != "cpu":
            memory = iter(pinned_memory.empty(parts))
        else:
            device = torch.device("cpu") if self._on_host else device
            memory = (torch.empty(count, dtype=dtype, device=device) for count, dtype in parts)
        for parameter, kind in zip(parameters, kinds, strict=True):
            state = self.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32)
            for key, signed in STATES.items():
                if kind is In8Bits:
                    state[key] = In8Bits(next(memory), next(memory), signed=signed)
                else:
                    state[key] = Exact(next(memory))

    def in_8_bits(self, parameter: Tensor) -> bool:
        """Return whether a parameter's states are held in 8 bits."""
        return self._in_8_bits and local(parameter).numel() >= SMALLEST

    def read(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the number of steps, and the states of this rank's elements in their shape; see `Held.read`."""
        state, shape = self._state_of(parameter), local(parameter).shape
        return {"step": state["step"]} | {key: state[key].read().view(shape) for key in STATES}

    def expanded(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the same, to be written; see `Held.expanded`."""
        state, shape = self._state_of(parameter), local(parameter).shape
        return {"step": state["step"]} | {key: state[key].expanded().view(shape) for key in STATES}

    def refresh(self) -> None:
        """Hold what was written into `expanded` tensors, and release them."""
        for state in self.state.values():
            for key in STATES:
                state[key].refresh()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients."""
        super().zero_grad(set_to_none)
        if self.host_gradients is not None:
            self.host_gradients.discard()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters that have gradients."""
        assert closure is None, "gradients are computed before"
        stepped = [
            (parameter, gradient, group)
            for group in self.param_groups
            for parameter in group["params"]
            if (gradient := gradient_of(self, parameter)) is not None
        ]
        device = local(self.param_groups[0]["params"][0]).device
        copies = self._on_host and device.type != "cpu"
        module = runtime(device)
        if copies:
            for signed in STATES.values():
                dynamic_table(signed, device)  # before the streams, which do not wait for each other
            module.synchronize(device)  # gradients are complete
        turns = cycle([module.Stream(device=device) if copies else None for _ in range(STREAMS)])
        for parameter, gradient, group in stepped:
            for start, stop in chunks(local(parameter).numel()):
                stream = next(turns)
                with module.stream(stream) if stream else nullcontext():
                    self._step(parameter, gradient, group, start, stop)
            self._state_of(parameter)["step"] += 1
        if copies:
            module.synchronize(device)  # the host may read its states, and other streams the parameters

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], start: int, stop: int) -> None:
        """Update elements [start, stop) of a parameter."""
        state = self._state_of(parameter)
        values, gradient = (each.view(-1)[start:stop] for each in (local(parameter), gradient))
        first, second = (state[key].load(start, stop, values.device) for key in STATES)
        adamw(
            [values],
            [gradient.to(values.device, non_blocking=True)],
            [first],
            [second],
            [],
            [state["step"].clone()],
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


def gradient_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """Return the gradient of this rank's elements of a parameter, on its device or the host; None: it has none."""
    if isinstance(optimizer, HeldAdamW) and optimizer.host_gradients is not None:
        return optimizer.host_gradients.get(parameter)
    return None if parameter.grad is None else local(parameter.grad)


@cache
def dynamic_table(signed: bool, device: torch.device | str = "cpu") -> Tensor:
    """Return the 256 values of a code, in order: in each of 7 decades twice as many as in the one below."""
    values = [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        means = 10.0 ** (decade - 6) * (bounds[:-1] + bounds[1:]) / 2
        values += means.tolist()
        values += (-means).tolist() if signed else []
    return torch.tensor(sorted(values), device=device)
