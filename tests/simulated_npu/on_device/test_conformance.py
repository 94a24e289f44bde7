"""The conformance suite finds each fault that is planted in a good backend, or in its device's runtime calls."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hwgrpo_backends import choose
from hwgrpo_backends.backend import Verdict
from hwgrpo_backends.npu import BACKEND
from hwgrpo_backends.testing import check_backend

RUNTIME = torch.npu
HUGE = 10**12


@pytest.fixture(scope="module")
def facts():
    return choose().facts


@pytest.fixture(autouse=True)
def _the_first_device_is_current():
    yield
    torch.npu.set_device(0)


def test_a_good_device_passes_every_check(facts):
    assert check_backend(BACKEND, facts) == [
        "data",
        "names: kernels, modules, attention, rollout",
        "probe",
        "device: Ascend910B3 (ascend910b3)",
        "memory: figures follow a block of 64 MiB",
        "visible devices: ASCEND_RT_VISIBLE_DEVICES='0' leaves 1 of 2",
        "collectives: all_reduce, broadcast, all_gather, all_gather_into_tensor, reduce_scatter_tensor, "
        "all_to_all_single in bfloat16, float16, float32 by hccl over 2 ranks",
    ]


def one_more_device(facts: Any) -> Verdict:
    verdict = BACKEND.probe(facts)
    return dataclasses.replace(verdict, devices=verdict.devices + verdict.usable)


ANYWHERE: dict[str, Any] = {"kernels": ("torch",), "modules": (), "attention": ("eager",)}
"""Names that exist for every type of device."""
NO_MORE: dict[str, Any] = {"comm": "hcl"}
"""Ends the suite in an error where the checks of this process end."""

FIELDS: Mapping[str, tuple[dict[str, Any], str]] = {
    "a communication backend that does not exist": (
        {"comm": "hcl"}, "comm is 'hcl', which torch.distributed does not have here"),
    "a communication backend that does not carry the device's tensors": (
        {"comm": "gloo", "visible_env": None}, "rank 0 of 2: all_reduce in bfloat16: RuntimeError: No backend type"),
    "a visibility variable that changes nothing": (
        {"visible_env": "NPU_VISIBLE"}, r"NPU_VISIBLE='0' leaves 2 of 2 devices, not 1"),
    "a kernel that does not exist": (
        {"kernels": ("tritton", "torch")}, "kernels has 'tritton', which is not registered"),
    "a kernel for other devices": (
        {"kernels": ("compiled", "torch")}, "kernels has 'compiled', which has no implementation for npu"),
    "an attention implementation that does not exist": (
        {"attention": ("flash_attention_4", "eager")}, "attention has 'flash_attention_4', which hwgrpo does not know"),
    "a rollout engine that does not exist": (
        {"rollout": ("vlm", "local")}, "rollout has 'vlm', which hwgrpo does not know"),
    "a fused module that does not exist": (
        {"modules": ("rms_norms",)}, "modules has 'rms_norms', which npu does not have"),
    "a device type of another family": (
        {"device_type": "cuda", **ANYWHERE}, "device_type='cuda' cannot be opened"),
    "a device type that torch does not know": (
        {"device_type": "ascend", **ANYWHERE}, "device_type='ascend' cannot be opened"),
    "a plug-in that is not the device's": (
        {"plugin": "torch_ascend"}, "cannot be opened: ModuleNotFoundError: No module named 'torch_ascend'"),
    "a probe that counts another number of devices": (
        {"probe": one_more_device}, "probe counts 3 devices and torch 2"),
    "a compute dtype that the device cannot compute in": (
        {"compute_dtypes": lambda index: (torch.float8_e8m0fnu, torch.float32)}, "matmul in torch.float8_e8m0fnu: "),
    "a compute dtype that is no floating-point one": (
        {"compute_dtypes": lambda index: (torch.float32, torch.int8)}, "compute_dtypes has torch.int8"),
    "an arch that raises": (
        {"arch": lambda index: {}[index]}, "arch: KeyError: 0"),
    "a variable that is no EnvVar": (
        {"env_train": {"TASK_QUEUE_ENABLE": "2"}}, "train variable TASK_QUEUE_ENABLE is not an EnvVar"),
    "a rollout variable that is no EnvVar": (
        {"env_rollout": {"A": "2"}}, "rollout variable A is not an EnvVar"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FIELDS)
def test_a_wrong_field_is_found(fault: str, facts):
    change, complaint = FIELDS[fault]
    with pytest.raises(AssertionError, match=complaint):
        check_backend(dataclasses.replace(BACKEND, **change), facts)


def test_an_arch_that_changes_between_calls_is_found(facts):
    answers = iter(["ascend910b3", "ascend910b4"])
    with pytest.raises(AssertionError, match="arch gives 'ascend910b3', then 'ascend910b4'"):
        check_backend(dataclasses.replace(BACKEND, arch=lambda index: next(answers)), facts)


def swapped(device: Any) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(0)[::-1]


def nothing(*arguments: Any) -> None: ...


def full_for_good() -> Callable[..., int]:
    highest = [0]

    def peak(device: Any) -> int:
        highest[0] = max(highest[0], torch.accelerator.max_memory_allocated(0))
        return highest[0]

    return peak


def one_device_more() -> int:
    return 3


def second_device(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: function(1)


def current(device: Any) -> int:
    return torch.accelerator.memory_allocated(0)


def in_mebibytes(function: Callable[..., int]) -> Callable[..., int]:
    return lambda device: function(device) // 2**20


def stream_of_the_other_device(device: Any = None) -> torch.Stream:
    return torch.Stream(device="npu:1")


CALLS: Mapping[str, tuple[dict[str, Any], str]] = {
    "free and total memory swapped": (
        {"mem_get_info": swapped}, r"memory\(\): free is \d+ and total \d+"),
    "no total memory": (
        {"mem_get_info": lambda device: (0, 0)}, r"memory\(\): free is 0 and total 0"),
    "free memory that does not fall": (
        {"mem_get_info": lambda device: (HUGE, 2 * HUGE)}, r"memory\(\)\.free falls by 0 bytes"),
    "free memory in mebibytes": (
        {"mem_get_info": lambda device: tuple(n >> 20 for n in torch.accelerator.get_memory_info(0))},
        r"memory\(\)\.free falls by 64 bytes"),
    "no allocated memory and no peak": (
        {"memory_allocated": lambda device: 0, "max_memory_allocated": lambda device: 0},
        r"memory\(\)\.allocated rises by 0 bytes"),
    "allocated memory that does not rise": (
        {"memory_allocated": lambda device: 7}, r"memory\(\)\.allocated rises by 0 bytes"),
    "allocated memory in mebibytes": (
        {"memory_allocated": in_mebibytes(RUNTIME.memory_allocated)}, r"memory\(\)\.allocated rises by 64 bytes"),
    "allocated memory of another device": (
        {"memory_allocated": second_device(RUNTIME.memory_allocated)}, r"memory\(\)\.allocated rises by 0 bytes"),
    "a peak that does not rise": (
        {"max_memory_allocated": lambda device: 0}, r"memory\(\)\.peak is 0 while \d+ bytes are allocated"),
    "a peak that is what is allocated now": (
        {"max_memory_allocated": current}, r"memory\(\)\.peak falls to \d+ when the block is freed"),
    "a peak that is never reset": (
        {"reset_peak_memory_stats": nothing}, r"reset_peak\(\) leaves memory\(\)\.peak at \d+"),
    "a peak that is kept elsewhere": (
        {"max_memory_allocated": full_for_good()}, r"reset_peak\(\) leaves memory\(\)\.peak at \d+"),
    "memory figures that are not numbers": (
        {"memory_allocated": lambda device: None}, r"memory\(\)\.allocated is None"),
    "too many devices": (
        {"device_count": one_device_more}, "probe counts 2 devices and torch 3"),
    "a device that cannot be made the current one": (
        {"set_device": nothing}, r"set_device\(\) of npu:1 leaves npu:0 the current one"),
    "a random state that is not restored": (
        {"set_rng_state": nothing}, "set_rng_state does not restore"),
    "a random state of another device": (
        {"get_rng_state": second_device(RUNTIME.get_rng_state)}, "set_rng_state does not restore"),
    "a generator that is not seeded": (
        {"manual_seed_all": nothing}, "manual_seed does not repeat"),
    "a synchronize that does not wait for copies": (
        {"synchronize": nothing}, r"pinned memory holds \[nan.* after synchronize\(\), not 33"),
    "a stream of another device": (
        {"Stream": stream_of_the_other_device}, r"new_stream\(\) is on npu:1, not on npu:0"),
    "a stream that is not used": (
        {"stream": contextlib.nullcontext}, r"stream\(\) leaves another stream the current one"),
    "a device without a name": (
        {"get_device_name": lambda device: ""}, "name is empty"),
}  # fmt: skip


@pytest.mark.parametrize("fault", CALLS)
def test_a_wrong_runtime_call_is_found(fault: str, facts, monkeypatch: pytest.MonkeyPatch):
    planted, complaint = CALLS[fault]
    for name, call in planted.items():
        monkeypatch.setattr(RUNTIME, name, call)
    named = dataclasses.replace(BACKEND, arch=lambda index: "ascend910b3")
    with pytest.raises(AssertionError, match=complaint):
        check_backend(named, facts)


def test_a_stream_that_stays_current_is_found(facts, monkeypatch: pytest.MonkeyPatch):
    @contextlib.contextmanager
    def entered(stream: torch.Stream):
        stream.__enter__()
        yield

    before = torch.npu.current_stream()
    monkeypatch.setattr(RUNTIME, "stream", entered)
    try:
        with pytest.raises(AssertionError, match=r"stream\(\) leaves its stream the current one"):
            check_backend(BACKEND, facts)
    finally:
        before.__enter__()


def test_a_synchronize_that_does_not_wait_is_found(facts, monkeypatch: pytest.MonkeyPatch):
    running = []

    class Asynchronous(torch.Stream):
        def query(self) -> bool:
            return not running

    def stream(device: Any) -> Asynchronous:
        running.append(1)
        return Asynchronous(device=device)

    monkeypatch.setattr(RUNTIME, "Stream", stream)
    synchronize = RUNTIME.synchronize
    monkeypatch.setattr(RUNTIME, "synchronize", lambda device: (running.clear(), synchronize(device)))
    with pytest.raises(AssertionError, match="comm is 'hcl'"):
        check_backend(dataclasses.replace(BACKEND, **NO_MORE), facts)
    monkeypatch.setattr(RUNTIME, "synchronize", nothing)
    with pytest.raises(AssertionError, match=r"synchronize\(\) returns while work is running"):
        check_backend(BACKEND, facts)


def test_memory_that_runs_out_in_an_error_that_nobody_recognizes_is_found(facts, monkeypatch: pytest.MonkeyPatch):
    real = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        try:
            return real(*size, **options)
        except torch.OutOfMemoryError:
            raise RuntimeError("error 4711: no room on the chip") from None

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(AssertionError, match=r"is_oom does not recognize .*RuntimeError: error 4711: no room"):
        check_backend(BACKEND, facts)
    known = dataclasses.replace(BACKEND, out_of_memory={"error 4711": "the driver"}, **NO_MORE)
    with pytest.raises(AssertionError, match="comm is 'hcl'"):
        check_backend(known, facts)


def probe_of_one(facts: Any) -> Verdict:
    verdict = BACKEND.probe(facts)
    return dataclasses.replace(verdict, devices=int(verdict.usable))


def test_the_variable_of_a_device_without_others_is_checked_by_hiding_it(facts, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RUNTIME, "device_count", lambda: 1)
    with pytest.raises(AssertionError, match="NPU_VISIBLE='-1' leaves 2 of 1 devices, not 0"):
        check_backend(dataclasses.replace(BACKEND, visible_env="NPU_VISIBLE", probe=probe_of_one), facts)


def test_free_memory_that_does_not_come_back_is_found(facts, monkeypatch: pytest.MonkeyPatch):
    lowest = [HUGE]

    def info(device: Any) -> tuple[int, int]:
        free, total = torch.accelerator.get_memory_info(0)
        lowest[0] = min(lowest[0], free)
        return lowest[0], total

    monkeypatch.setattr(RUNTIME, "mem_get_info", info)
    with pytest.raises(AssertionError, match=r"empty_cache\(\) leaves \d+ bytes less free"):
        check_backend(BACKEND, facts)


def test_allocated_memory_that_does_not_fall_is_found(facts, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RUNTIME, "memory_allocated", full_for_good())
    with pytest.raises(AssertionError, match=r"memory\(\)\.allocated is \d+ bytes higher than before"):
        check_backend(BACKEND, facts)


def test_memory_without_a_limit_is_found(facts, monkeypatch: pytest.MonkeyPatch):
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **options: real(1 if size == 10**15 else size, **options))
    with pytest.raises(AssertionError, match="bytes can be allocated"):
        check_backend(BACKEND, facts)
