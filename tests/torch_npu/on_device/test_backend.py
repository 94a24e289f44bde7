"""The backend npu with the real torch-npu: the choice, the runtime calls of a trainer, the conformance suite."""

import re

import pytest
import torch
import torch_npu
import virtual_ascend
from hwgrpo_backends import BackendError, choose
from hwgrpo_backends.conformance_device import check_device
from hwgrpo_backends.device import Device
from hwgrpo_backends.npu import BACKEND
from hwgrpo_backends.testing import check_backend

MISSING = ("npu_gelu", "npu_fast_gelu", "npu_dtype_cast", "npu_scaled_masked_softmax", "npu_geglu")
FAILS = r"not in libopapi\.so|error code is 207000"


@pytest.fixture
def device() -> Device:
    return Device(BACKEND)


def test_it_is_the_real_torch_npu():
    assert torch_npu.__version__ == "2.13.0"
    assert "fetched" in torch_npu.__file__
    assert not hasattr(torch_npu, "_device"), "this is the simulation of tests/simulated_npu"


def test_the_backend_is_chosen_because_torch_npu_finds_a_device():
    choice = choose()
    assert choice.backend is BACKEND
    assert choice.decision.verdicts["npu"].state == "ok"
    assert choice.decision.verdicts["npu"].devices == 1


def test_the_device_passes_the_conformance_suite_but_for_one_collective_that_computes():
    assert check_device(BACKEND, 1) == [
        "device: Ascend910B1 (ascend910b1)",
        "memory: figures follow a block of 64 MiB",
    ]
    # torch-npu fills the memory of a gathered list by an operator of CANN's, called below those that run on the host
    with pytest.raises(AssertionError, match="collectives by comm='hccl' on npu, rank 0 of 1: ") as raised:
        check_backend(BACKEND, choose().facts)
    wrong = re.findall(r"(\w+) in (\w+)(?:: \w+: .*?OPS function error: (\w+)| gives)", str(raised.value))
    assert wrong == [("all_gather", name, "Fill") for name in ("bfloat16", "float16", "float32")]


def test_a_rank_too_many_is_told(device: Device):
    with pytest.raises(BackendError, match="this process sees 1"):
        Device(BACKEND, local_rank=1)


def test_memory_is_counted_by_torch_npus_allocator(device: Device):
    device.set_device()
    device.reset_peak()
    before = device.memory()
    assert before.free is not None
    assert before.total == 8 * 2**30
    x = torch.zeros(100_000, device=device.torch_device)
    during = device.memory()
    assert 400_000 <= during.allocated - before.allocated < 402_000
    del x
    device.empty_cache()
    device.synchronize()
    after = device.memory()
    assert (after.allocated, after.peak) == (before.allocated, during.allocated)


def test_a_full_device_is_out_of_memory(device: Device):
    with pytest.raises(device.oom_error) as caught:
        torch.empty(2**40, dtype=torch.uint8, device=device.torch_device)
    assert device.is_oom(caught.value)


def test_the_random_state_is_saved_and_restored(device: Device):
    device.manual_seed(5)
    state = device.rng_state()
    first = torch.rand(4, device=device.torch_device)
    assert not torch.equal(device.rng_state(), state)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=device.torch_device), first)


def test_work_is_submitted_to_a_stream(device: Device):
    stream = device.new_stream()
    with device.stream(stream):
        assert torch.npu.current_stream() == stream
    assert torch.npu.current_stream() != stream


def test_the_device_computes_in_bf16(device: Device):
    assert device.compute_dtypes == (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("op", MISSING)
def test_a_fused_operator_without_a_kernel_here_raises(op: str):
    x = torch.randn(2, 4, 32, 32, device="npu")
    arguments = {
        "npu_dtype_cast": (x, torch.bfloat16),
        "npu_scaled_masked_softmax": (x, torch.zeros(2, 1, 32, 32, dtype=torch.bool, device="npu"), 1.0, False),
    }.get(op, (x,))
    with pytest.raises(RuntimeError, match=FAILS):
        getattr(torch.ops.npu, op)(*arguments)


def test_most_of_aten_is_given_over_and_the_rest_fails():
    assert len(virtual_ascend.given_over) > 900
    with pytest.raises(RuntimeError, match=FAILS):
        torch.batch_norm_stats(torch.randn(2, 3, 4, device="npu"), 1e-5)


def test_a_tensor_that_is_left_on_the_host_ends_the_call():
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(2, device="npu") + torch.ones(2)


def test_memory_that_nobody_wrote_is_seen():
    torch.npu.empty_cache()
    assert torch.empty(2**22, device="npu").cpu().isnan().all()
