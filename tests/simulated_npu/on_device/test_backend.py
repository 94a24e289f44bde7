"""The backend npu on a host that has its device: the choice and the runtime calls."""

import pytest
import torch
import torch_npu
from hwgrpo_backends import BackendError, choose
from hwgrpo_backends.device import Device
from hwgrpo_backends.npu import BACKEND


@pytest.fixture
def device():
    device = Device(BACKEND, local_rank=1)
    yield device
    torch.npu.set_device(0)


def test_the_backend_is_chosen_because_its_plug_in_finds_devices():
    choice = choose()
    assert choice.backend is BACKEND
    assert choice.decision.verdicts["npu"].state == "ok"
    assert choice.decision.verdicts["npu"].devices == 2
    assert choice.facts.torch_plugins == ("torch_npu",)


def test_a_rank_gets_its_own_device(device: Device):
    device.set_device()
    assert torch.zeros(1, device="npu").device == torch.device("npu:1")
    with pytest.raises(BackendError, match="this process sees 2"):
        Device(BACKEND, local_rank=2)


def test_memory_is_that_of_the_rank(device: Device):
    device.reset_peak()
    before = device.memory()
    assert before.free is not None
    assert before.total is not None
    assert before.allocated == before.peak == before.total - before.free
    x = torch.zeros(1000, device=device.torch_device)
    assert device.memory().allocated == before.allocated + 4000
    del x
    device.empty_cache()
    device.synchronize()
    after = device.memory()
    assert (after.allocated, after.peak) == (before.allocated, before.allocated + 4000)


def test_a_full_device_is_out_of_memory(device: Device):
    with pytest.raises(device.oom_error) as caught:
        torch.zeros(2**40, device=device.torch_device)
    assert device.is_oom(caught.value)


def test_the_random_state_is_the_devices(device: Device):
    device.manual_seed(5)
    state = device.rng_state()
    first = torch.rand(4, device=device.torch_device)
    assert not torch.equal(device.rng_state(), state)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=device.torch_device), first)


def test_work_is_submitted_to_a_stream(device: Device):
    device.set_device()
    stream = device.new_stream()
    with device.stream(stream):
        assert torch.accelerator.current_stream() == stream
    assert torch.accelerator.current_stream() != stream


def test_what_the_simulation_lacks_of_torch_npu_fails_instead_of_passing():
    with pytest.raises(AttributeError, match="no get_cann_version"):
        torch_npu.get_cann_version  # noqa: B018
    with pytest.raises(NotImplementedError, match="no npu_rms_norm"):
        torch_npu.npu_rms_norm(torch.ones(2))
