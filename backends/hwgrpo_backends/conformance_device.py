"""Conformance of the device of this process: it is opened, computes, allocates and measures. Imports torch."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hwgrpo_backends.backend import Backend
from hwgrpo_backends.device import Device, Memory

BLOCK = 64 * 2**20
"""Bytes that are allocated to see the figures follow."""
MORE_THAN_ANY = 10**15
"""Bytes that no device has."""
SUBMITTED = 16
"""Operations on a block that keep an asynchronous device busy for longer than it takes to submit them."""


def check_device(backend: Backend, count: int) -> list[str]:
    """Check the first device of this process; return the checks, one line each.

    Args:
        count: devices that the probe counts.

    Raises:
        AssertionError: a call differs from docs/add-a-backend.md; the message names it.
    """
    with _named(f"device_type={backend.device_type!r} cannot be opened"):
        device = Device(backend)
    _check_identity(device, count)
    _check_current_device(backend, device)
    for dtype in _compute_dtypes(device):
        _check_matmul(device, dtype)
    _check_tied_weights(device)
    _check_random_state(device)
    _check_stream(device)
    _check_copies(device)
    _check_recorder(device)
    return [f"device: {device.name} ({device.arch})", _check_memory(device)]


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Add the name of the check to an exception."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def _check_identity(device: Device, count: int) -> None:
    assert device.count == count, f"probe counts {count} devices and torch {device.count}"
    with _named("arch"):
        first, second = device.arch, device.arch
    assert first, "arch is empty"
    assert first == second, f"arch gives {first!r}, then {second!r}: it must stay the same"
    assert device.name, "name is empty"


def _check_current_device(backend: Backend, device: Device) -> None:
    with _named(f"the last of {device.count} devices"):
        last = Device(backend, device.count - 1)
        last.set_device()
        here = torch.zeros(1, device=backend.device_type).device
    assert here == last.torch_device, f"set_device() of {last.torch_device} leaves {here} the current one"
    device.set_device()


def _compute_dtypes(device: Device) -> tuple[torch.dtype, ...]:
    with _named("compute_dtypes"):
        dtypes = device.compute_dtypes
    assert dtypes, "compute_dtypes is empty"
    for dtype in dtypes:
        assert isinstance(dtype, torch.dtype), f"compute_dtypes has {dtype!r}, no dtype of torch"
        assert dtype.is_floating_point, f"compute_dtypes has {dtype}, in which nothing can be trained"
    assert torch.float32 in dtypes, "compute_dtypes must include float32"
    return dtypes


def _check_matmul(device: Device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 32, 32, generator=generator).to(dtype).unbind()
    with _named(f"matmul in {dtype}"):
        product = (left.to(device.torch_device) @ right.to(device.torch_device)).to("cpu", torch.float64)
    want = left.double() @ right.double()
    error = ((product - want).norm() / want.norm()).item()
    # One rounding of the product to dtype; fp32 matmuls may use formats with 10 mantissa bits (TF32).
    assert error < 2 * max(torch.finfo(dtype).eps, 2**-11), f"matmul in {dtype}: relative error {error:.2g}"


def _check_tied_weights(device: Device) -> None:
    pair = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    pair[0].weight = pair[1].weight
    pair.to(device.torch_device)
    # A plug-in declares by `_has_compatible_shallow_copy_type` that parameters can change their device in place.
    assert pair[0].weight is pair[1].weight, "module.to(device) unties tied weights: an LM head leaves its embedding"


def _check_copies(device: Device) -> None:
    """Check copies from and to pinned memory that do not wait, as the states of an optimizer on the host are copied."""
    if device.backend.is_host:
        return
    with _named("copies that do not wait"):
        held = torch.ones(BLOCK // 4).pin_memory()
        for _ in range(2):  # each copy must see the one before, in the order of the stream
            there = held.to(device.torch_device, non_blocking=True)
            for _ in range(SUBMITTED):
                there += 1
            held.copy_(there, non_blocking=True)
        device.synchronize()
    expected = 1 + 2 * SUBMITTED
    assert bool((held == expected).all()), (
        f"copies that do not wait: pinned memory holds {held.unique().tolist()[:4]} after synchronize(), not {expected}"
    )


def _check_random_state(device: Device) -> None:
    _random(device)  # so that the generators of other devices are in another state
    state = device.rng_state()
    assert state.dtype == torch.uint8, f"rng_state is {state.dtype}"
    assert state.device.type == "cpu", f"rng_state is on {state.device}"
    first = _random(device)
    device.set_rng_state(state)
    assert torch.equal(_random(device), first), "set_rng_state does not restore"
    device.manual_seed(1)
    first = _random(device)
    device.manual_seed(1)
    assert torch.equal(_random(device), first), "manual_seed does not repeat"


def _random(device: Device) -> torch.Tensor:
    return torch.rand(8, device=device.torch_device).cpu()


def _check_stream(device: Device) -> None:
    stream, before = device.new_stream(), _current_stream(device)
    where = getattr(stream, "device", device.torch_device)  # the host processor's have none
    assert where == device.torch_device, f"new_stream() is on {where}, not on {device.torch_device}"
    with device.stream(stream), device.trace("check_backend"):
        assert _current_stream(device) == stream, "stream() leaves another stream the current one"
        block = torch.zeros(BLOCK // 4, device=device.torch_device)
        for _ in range(SUBMITTED):
            block += 1
    assert _current_stream(device) == before, "stream() leaves its stream the current one at its end"
    device.synchronize()
    done = not hasattr(stream, "query") or stream.query()
    assert done, "synchronize() returns while work is running that was submitted to a stream of the device"
    assert bool((block == SUBMITTED).all()), "work that was submitted to a stream is not done after synchronize()"


def _current_stream(device: Device) -> object:
    return torch.get_device_module(device.torch_device.type).current_stream(device.torch_device)


def _check_recorder(device: Device) -> None:
    if device.recorder is None:
        return
    x = torch.ones(8, device=device.torch_device)
    recording = device.recorder(lambda: (x + 1).cumsum(0))
    for start in (1.0, 5.0):
        x.fill_(start)
        recording.replay()
        expected = (start + 1) * torch.arange(1.0, 9.0)
        assert torch.equal(recording.output.cpu(), expected), "a replayed graph does not read its input again"
    recording.release()


def _check_memory(device: Device) -> str:
    _check_full(device)
    if not device.measures_memory:
        assert device.memory() == Memory(), f"{device.memory()} of a device without memory to measure"
        return "memory: not measured, the device is the host processor"
    gc.collect()  # memory freed later would look like a block that was not allocated
    device.synchronize()
    device.empty_cache()
    device.reset_peak()
    before = _figures(device)
    block = torch.ones(BLOCK, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    _check_allocated(before, held := _figures(device))
    del block
    _check_freed(before, held, _figures(device))
    device.empty_cache()
    device.reset_peak()
    _check_reset(before, held, _figures(device))
    return f"memory: figures follow a block of {BLOCK // 2**20} MiB"


def _check_full(device: Device) -> None:
    error = _error_of_full_memory(device)
    assert device.is_oom(error), (
        f"is_oom does not recognize what {MORE_THAN_ANY} bytes raise: {type(error).__name__}: {error}. "
        "Put a pattern of it into out_of_memory"
    )


def _error_of_full_memory(device: Device) -> Exception:
    try:
        torch.empty(MORE_THAN_ANY, dtype=torch.uint8, device=device.torch_device)
    except Exception as error:
        return error
    raise AssertionError(f"{MORE_THAN_ANY} bytes can be allocated: the device must raise where its memory is full")


def _figures(device: Device) -> dict[str, int]:
    with _named("memory()"):
        figures = dataclasses.asdict(device.memory())
    for name, value in figures.items():
        assert isinstance(value, int), f"memory().{name} is {value!r}, not a number of bytes"
    free, total = figures["free"], figures["total"]
    assert 0 < free <= total, f"memory(): free is {free} and total {total}: mem_get_info returns free, then total"
    return figures


def _check_allocated(before: dict[str, int], held: dict[str, int]) -> None:
    rise, fall = held["allocated"] - before["allocated"], before["free"] - held["free"]
    assert BLOCK <= rise <= 2 * BLOCK, f"memory().allocated rises by {rise} bytes when {BLOCK} are allocated"
    # allocators keep some in reserve, and other processes may free some
    assert fall >= BLOCK // 2, f"memory().free falls by {fall} bytes when {BLOCK} are allocated"
    peak, allocated = held["peak"], held["allocated"]
    assert peak >= allocated, f"memory().peak is {peak} while {allocated} bytes are allocated"


def _check_freed(before: dict[str, int], held: dict[str, int], freed: dict[str, int]) -> None:
    kept = freed["allocated"] - before["allocated"]
    assert kept < BLOCK // 2, f"memory().allocated is {kept} bytes higher than before a block that was freed"
    lowest = held["allocated"]
    assert freed["peak"] >= lowest, f"memory().peak falls to {freed['peak']} when the block is freed, from {lowest}"


def _check_reset(before: dict[str, int], held: dict[str, int], after: dict[str, int]) -> None:
    peak, highest = after["peak"], held["allocated"]
    assert peak < highest, f"reset_peak() leaves memory().peak at {peak}, with {after['allocated']} bytes allocated"
    missing = before["free"] - after["free"]
    assert missing < BLOCK // 2, f"empty_cache() leaves {missing} bytes less free than before a block that was freed"
