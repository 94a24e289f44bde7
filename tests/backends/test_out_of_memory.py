"""What each family's errors say when memory is full, and what else they say."""

import dataclasses

import pytest
import torch
from hwgrpo_backends import registry
from hwgrpo_backends.device import Device

CPU = registry.get("cpu")

FULL = {
    "cpu": ["[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"],
    "cuda": [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA driver error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "NCCL error in: ProcessGroupNCCL.cpp:1333, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
        "Triton Error [CUDA]: out of memory",
    ],
    "rocm": [
        "HIP out of memory. Tried to allocate 2.00 GiB",
        "HIP error: out of memory",
        "hipErrorOutOfMemory",
        "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
        "rocblas_status_memory_error",
        "Last error:\nHIP failure 'out of memory'",
        "Triton Error [HIP]:  Code: 2, Messsage: out of memory",
    ],
    "npu": [
        "NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity)",
        "NPU function error: call aclnnMoeDistributeDispatchV2 failed, error code is 207001\n[Error]: Failed to apply",
        "ACL stream synchronize failed, error code:207018",
        "error code is 200000",
        "EL0004: [PID: 316198] 2025-09-28-07:22:29.827.496 Failed to allocate memory.",
    ],
}
OTHERS = [
    "mat1 and mat2 shapes cannot be multiplied",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    "out of resource: shared memory, Required: 262144, Hardware limit: 232448",
    "HIP error: invalid device function",
    "index 207001 is out of bounds for dimension 0 with size 12",
    "ACL stream synchronize failed, error code:507015",
    "error code is 2070011",
    "error code is 207003",
    "the judge's server ran out of memory",
    "EL00041",
]
RAISED = [(name, text) for name, texts in FULL.items() for text in texts]


def device(name):
    """The errors of a family, on a host that has none of its devices."""
    return Device(dataclasses.replace(CPU, out_of_memory=registry.get(name).out_of_memory))


@pytest.mark.parametrize(("name", "text"), RAISED)
def test_a_familys_plain_errors_of_full_memory_are_recognised(name, text):
    assert device(name).is_oom(RuntimeError(text))
    assert not device(name).is_oom(ValueError(text)), "another kind of error only tells of it"


@pytest.mark.parametrize("text", OTHERS)
@pytest.mark.parametrize("name", registry.BUILTIN)
def test_other_errors_are_not_taken_for_full_memory(name, text):
    assert not device(name).is_oom(RuntimeError(text))


@pytest.mark.parametrize("name", registry.BUILTIN)
def test_every_pattern_is_needed_and_says_who_raises_it(name):
    patterns = registry.get(name).out_of_memory
    assert patterns
    assert all(patterns.values())
    for pattern in patterns:
        rest = {p: why for p, why in patterns.items() if p != pattern}
        poorer = Device(dataclasses.replace(CPU, out_of_memory=rest))
        missed = [text for text in FULL[name] if not poorer.is_oom(RuntimeError(text))]
        assert missed or name == "cpu", f"nothing shows what {pattern} is for"


@pytest.mark.parametrize("name", registry.BUILTIN)
def test_a_full_host_memory_is_known_on_every_family(name):
    here = device(name)
    with pytest.raises(RuntimeError) as real:
        torch.empty(10**15, dtype=torch.uint8)
    assert here.is_oom(real.value)
    assert here.is_oom(MemoryError())
    assert here.is_oom(torch.OutOfMemoryError("whatever it says"))
