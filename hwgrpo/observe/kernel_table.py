"""The longest kernels of some work, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.profiler import profile


class Kernel(NamedTuple):
    """All calls of one kernel."""

    name: str
    calls: int
    seconds: float


@contextmanager
def profiled(synchronize: Callable[[], None]) -> Iterator[profile]:
    """Profile the block on the host and on the device, if torch's profiler supports it.

    Args:
        synchronize: waits for the device, so that the profile has the block's work and no other.
    """
    synchronize()
    with profile() as profiler:  # its default activities are those of the host and of the device that torch has
        yield profiler
        synchronize()


def longest_kernels(profiler: profile) -> list[Kernel]:
    """Return the device's kernels, longest in total first; where there are none, the host's operations."""
    averages = profiler.key_averages()
    kernels = [
        Kernel(each.key, each.count, each.self_device_time_total / 1e6)
        for each in averages
        if each.device_type != DeviceType.CPU and not each.is_user_annotation
    ]
    operations = [
        Kernel(each.key, each.count, each.self_cpu_time_total / 1e6)
        for each in averages
        if each.device_type == DeviceType.CPU and not each.is_user_annotation
    ]
    return sorted(kernels or operations, key=lambda each: -each.seconds)


def kernel_table(kernels: Sequence[Kernel], rows: int = 40, times: int = 1) -> str:
    """Return a table of the longest kernels.

    Args:
        kernels: longest first.
        rows: most of them that are named; the sum is of all.
        times: how often the profiled work ran; milliseconds and calls are of one time.
    """
    total = sum(each.seconds for each in kernels)
    calls = sum(each.calls for each in kernels)
    lines = [f"{'ms':>10}  {'share':>6}  {'calls':>8}  kernel"]
    for each in kernels[:rows]:
        share = each.seconds / total if total else 0.0
        lines.append(f"{each.seconds / times * 1e3:10.3f}  {share:6.1%}  {each.calls / times:8.4g}  {each.name}")
    lines.append(f"{total / times * 1e3:10.3f}  {1:6.1%}  {calls / times:8.4g}  all {len(kernels)} kernels")
    return "\n".join(lines) + "\n"
