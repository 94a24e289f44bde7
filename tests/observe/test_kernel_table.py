"""The table of the longest kernels adds up what torch's profiler has seen."""

from types import SimpleNamespace

import torch
from torch.autograd import DeviceType

from hwgrpo.observe.kernel_table import Kernel, kernel_table, longest_kernels, profiled


def test_the_operations_of_a_host_are_counted_in_the_block_alone():
    waits: list[str] = []
    left, right = torch.ones(64, 64), torch.ones(64, 64)
    torch.add(left, right)
    with profiled(lambda: waits.append("waited")) as profiler:
        for _ in range(3):
            torch.mm(left, right)
    assert waits == ["waited", "waited"]
    kernels = longest_kernels(profiler)
    calls = {each.name: each.calls for each in kernels}
    assert calls["aten::mm"] == 3
    assert "aten::add" not in calls
    assert [each.seconds for each in kernels] == sorted((each.seconds for each in kernels), reverse=True)


def event(name: str, device: DeviceType, microseconds: float, annotation: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        key=name, count=2, device_type=device, is_user_annotation=annotation,
        self_device_time_total=microseconds, self_cpu_time_total=7 * microseconds,
    )  # fmt: skip


def test_a_device_has_its_kernels_in_the_table_without_the_operations_that_launched_them():
    on_device = DeviceType.CUDA  # hw: the type of kernels in torch's profiles
    events = [
        event("aten::mm", DeviceType.CPU, 40.0),
        event("gemm", on_device, 40.0),
        event("softmax", on_device, 60.0),
        event("update_actor", on_device, 100.0, annotation=True),
    ]
    profiler = SimpleNamespace(key_averages=lambda: events)
    assert longest_kernels(profiler) == [Kernel("softmax", 2, 60e-6), Kernel("gemm", 2, 40e-6)]  # pyright: ignore[reportArgumentType]


def test_a_table_is_of_one_time_and_sums_all_kernels():
    kernels = [Kernel("softmax", 8, 0.6), Kernel("gemm", 4, 0.3), Kernel("copy", 4, 0.1)]
    assert kernel_table(kernels, rows=2, times=4).splitlines() == [
        "        ms   share     calls  kernel",
        "   150.000   60.0%         2  softmax",
        "    75.000   30.0%         1  gemm",
        "   250.000  100.0%         4  all 3 kernels",
    ]
    assert kernel_table([]).splitlines()[-1] == "     0.000  100.0%         0  all 0 kernels"
