"""The runtime calls of a trainer: for real on the CPU, and routed to the right device module elsewhere."""

import dataclasses
import inspect
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hwgrpo_backends import registry
from hwgrpo_backends.backend import BackendError, EnvVar, Verdict
from hwgrpo_backends.cuda import CUDNN_LAST
from hwgrpo_backends.device import Device, Memory
from hwgrpo_backends.peaks import Chip
from hwgrpo_backends.testing import check_backend

from tests.support.devices.recorder import ReplayedOnCpu

CPU = registry.get("cpu")


@pytest.fixture
def cpu():
    return Device(CPU, local_rank=3)


def test_every_process_shares_the_one_host_processor(cpu):
    assert cpu.torch_device == torch.device("cpu")
    assert cpu.comm_backend == "gloo"
    cpu.set_device()
    cpu.synchronize()
    cpu.empty_cache()
    cpu.reset_peak()


def test_the_host_processor_has_no_memory_figures_rather_than_zeros(cpu):
    assert cpu.memory() == Memory(free=None, total=None, allocated=None, peak=None)


def test_fp32_is_the_default_compute_dtype_of_the_cpu(cpu):
    assert cpu.compute_dtypes[0] is torch.float32
    assert torch.bfloat16 in cpu.compute_dtypes


def test_the_random_state_makes_a_round_trip(cpu):
    state = cpu.rng_state()
    assert state.dtype == torch.uint8
    first = torch.rand(4)
    assert not torch.equal(torch.rand(4), first)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)


def test_a_seed_repeats_the_numbers(cpu):
    cpu.manual_seed(7)
    first = torch.rand(4)
    cpu.manual_seed(8)
    assert not torch.equal(torch.rand(4), first)
    cpu.manual_seed(7)
    assert torch.equal(torch.rand(4), first)


def test_streams_and_traces_are_contexts(cpu):
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile as profiler, cpu.stream(cpu.new_stream()), cpu.trace("the rollout"):
        torch.ones(2).sum()
    assert "the rollout" in {event.key for event in profiler.key_averages()}


def test_running_out_of_memory_is_recognised_and_other_errors_are_not(cpu):
    with pytest.raises(RuntimeError) as real:
        torch.empty(10**15, dtype=torch.uint8)
    assert cpu.is_oom(real.value)
    assert cpu.is_oom(torch.OutOfMemoryError("CUDA out of memory"))
    assert cpu.is_oom(MemoryError())
    assert not cpu.is_oom(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not cpu.is_oom(ValueError("out of memory"))
    with pytest.raises(cpu.oom_error):
        raise torch.OutOfMemoryError("full")


class FakeModule:
    """Stands in for torch.<device>: remembers what was called with what."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, *args, *kwargs.values()))
            answers = {
                "device_count": 2,
                "mem_get_info": (10, 40),
                "memory_allocated": 25,
                "max_memory_allocated": 30,
                "get_rng_state": torch.zeros(8, dtype=torch.uint8),
            }
            return answers.get(name)

        return call


@pytest.fixture
def out_of_tree(monkeypatch):
    """A backend on torch's device type for vendors outside its tree, with a module that records calls."""
    module = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)
    backend = dataclasses.replace(
        CPU, name="chip", device_type="privateuseone", visible_env="CHIP_VISIBLE_DEVICES", comm="chipcl"
    )
    return backend, module


def test_an_out_of_tree_device_gets_every_call_with_its_own_index(out_of_tree):
    backend, module = out_of_tree
    device = Device(backend, local_rank=1)
    here = torch.device("privateuseone", 1)
    assert device.torch_device == here
    assert device.comm_backend == "chipcl"
    device.set_device()
    device.synchronize()
    device.empty_cache()
    device.reset_peak()
    assert device.memory() == Memory(free=10, total=40, allocated=25, peak=30)
    state = device.rng_state()
    device.set_rng_state(state)
    stream = device.new_stream()
    device.stream(stream)
    calls = {name: args for name, *args in module.calls}
    for name in ("set_device", "synchronize", "reset_peak_memory_stats", "mem_get_info", "get_rng_state", "Stream"):
        assert calls[name] == [here], name
    assert calls["set_rng_state"] == [state, here]
    assert calls["empty_cache"] == []


def test_a_rank_without_a_device_is_refused_with_the_variable_to_check(out_of_tree):
    backend, _ = out_of_tree
    with pytest.raises(BackendError, match=r"local rank 2 .*sees 2\..*CHIP_VISIBLE_DEVICES"):
        Device(backend, local_rank=2)


def test_a_missing_plug_in_module_is_not_passed_over(out_of_tree):
    backend, _ = out_of_tree
    with pytest.raises(ModuleNotFoundError, match="no_such_plugin"):
        Device(dataclasses.replace(backend, plugin="no_such_plugin"))


@pytest.fixture
def attention_kernels():
    """Restores which kernels torch may choose."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(
    ("value", "kernels"),
    [
        ("1", ("flash", "mem_efficient", "math")),
        ("0", ("flash", "mem_efficient", "math", "cudnn")),
        (None, ("flash", "mem_efficient", "math", "cudnn")),
    ],
)
def test_cudnns_attention_is_off_where_its_variable_says_so(
    monkeypatch, attention_kernels, out_of_tree, value, kernels
):
    cuda, module = registry.get("cuda"), out_of_tree[1]
    monkeypatch.delenv(CUDNN_LAST, raising=False)
    if value is not None:
        monkeypatch.setenv(CUDNN_LAST, value)
    assert cuda.environment("train")[CUDNN_LAST].value == cuda.environment("rollout")[CUDNN_LAST].value == "1"
    Device(cuda).set_device()
    assert cuda.sdpa_kernels() == kernels
    assert module.calls[-1][0] == "set_device"


@pytest.mark.parametrize(("capability", "default"), [((7, 0), torch.float16), ((8, 0), torch.bfloat16)])
def test_a_v100_is_not_given_bf16(monkeypatch, capability, default):
    cuda = registry.get("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert cuda.compute_dtypes(0)[0] is default
    assert (torch.bfloat16 in cuda.compute_dtypes(0)) == (capability >= (8, 0))
    assert cuda.arch(0) == f"sm_{capability[0]}{capability[1]}"


@pytest.mark.parametrize(("chip", "bf16"), [("Ascend910B1", True), ("Ascend310P3", False)])
def test_an_npu_is_asked_whether_it_has_bf16(monkeypatch, chip, bf16):
    npu = registry.get("npu")
    module = SimpleNamespace(is_bf16_supported=lambda: bf16, get_device_name=lambda index: chip)
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)
    assert (npu.compute_dtypes(0)[0] is torch.bfloat16) == bf16
    assert (torch.bfloat16 in npu.compute_dtypes(0)) == bf16
    assert npu.arch(0) == chip.lower()


def test_an_amd_gpu_is_named_by_its_target_without_its_feature_flags(monkeypatch):
    rocm = registry.get("rocm")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert rocm.arch(0) == "gfx942"
    assert rocm.compute_dtypes(0)[0] is torch.bfloat16


class FakeCuda:
    """Stands in for what torch.cuda has of graphs; its calls must fit the signatures of torch's own."""

    def __init__(self, monkeypatch) -> None:
        self.events: list[str] = []
        real = torch.cuda.graph
        events = self.events

        class Graph:
            def replay(self):
                events.append("replay")

            def reset(self):
                events.append("reset")

        @contextmanager
        def graph(*args, **kwargs):
            bound = inspect.signature(real).bind(*args, **kwargs)
            assert isinstance(bound.arguments["cuda_graph"], Graph)
            assert bound.arguments["capture_error_mode"] == "thread_local"
            events.append("begin")
            yield
            events.append("end")

        @contextmanager
        def stream(current):
            yield
            events.append(f"back to {current}")

        assert {"replay", "reset"} <= vars(torch.cuda.CUDAGraph).keys()
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: "ours")
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronize"))


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_a_gpu_records_after_a_first_run_and_waits_before_it_gives_memory_back(name, monkeypatch):
    events = FakeCuda(monkeypatch).events
    record = registry.get(name).record
    assert record is not None
    recording = record(lambda: events.append("work") or len(events))
    assert recording.output == 3, "what the recorded run returned, not the first"
    recording.replay()
    recording.release()
    assert events == ["work", "begin", "work", "end", "back to ours", "replay", "synchronize", "reset"]
    assert recording.output is None


def test_only_backends_with_graphs_have_a_recorder():
    assert {name for name in registry.BUILTIN if registry.get(name).record} == {"cuda", "rocm"}
    assert {name for name in registry.BUILTIN if registry.get(name).graphs_by_default} == {"cuda"}
    assert Device(CPU).recorder is None


class Stale(ReplayedOnCpu):
    def replay(self):
        if self.replays == 0:
            super().replay()


def test_the_conformance_suite_tries_the_recorder(this_host):
    with pytest.raises(AssertionError, match="comm is 'none'"):  # what is checked after the device
        check_backend(dataclasses.replace(CPU, record=ReplayedOnCpu, comm="none"), this_host)
    with pytest.raises(AssertionError, match="does not read its input again"):
        check_backend(dataclasses.replace(CPU, record=Stale), this_host)


@pytest.mark.parametrize("name", [name for name in registry.BUILTIN if name != "cpu"])
def test_every_built_in_accelerator_conforms(name, this_host):
    report = check_backend(registry.get(name), this_host)
    assert report[:3] == ["data", "names: kernels, modules, attention, rollout", "probe"]
    assert report[3].startswith("device:")


CHIP = Chip(arch="a1", name="A1", flops={"float32": 1e12}, bandwidth=None, source="its data sheet")


def test_the_conformance_suite_takes_all_data_that_a_backend_can_have(this_host):
    told = EnvVar(value="1", why="numbers repeat")
    full = dataclasses.replace(
        registry.get("npu"),
        env_deterministic={"ORDER": told},
        attention_archs={"sdpa": ("a1", "a2")},
        modules=("rms_norm",),
        out_of_memory={"no room (here|there)": "the driver"},
        chips=(CHIP, dataclasses.replace(CHIP, bandwidth=1e9)),
    )
    assert check_backend(full, this_host)[0] == "data"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": "My Chip"}, "lower-case"),
        ({"kernels": ("triton",)}, "must end with 'torch'"),
        ({"probe": lambda facts: "yes"}, "returned a str"),
        ({"probe": lambda facts: Verdict(state="ok", reason="always", devices=1)}, "nothing installed"),
        ({"probe": lambda facts: Verdict(state="unusable", reason="")}, "no reason"),
        ({"probe": lambda facts: Verdict(state="unusable", reason="x", devices=2)}, "with 2 devices"),
        ({"compute_dtypes": lambda index: (torch.bfloat16,)}, "must include float32"),
        ({"arch": lambda index: ""}, "arch is empty"),
        ({"env_deterministic": {"ORDER": "fixed"}}, "deterministic train variable ORDER is not an EnvVar"),
        ({"env_deterministic": {"ORDER": EnvVar(value="fixed", why="")}}, "train variable ORDER has no reason"),
        ({"attention_archs": {"flash_attention_2": ("a1",)}}, "'flash_attention_2', which is not in attention"),
        ({"attention_archs": {"sdpa": "a1"}}, "attention_archs of 'sdpa' is 'a1', not a tuple of texts"),
        ({"attention_archs": {"sdpa": ()}}, "attention_archs of 'sdpa' is empty"),
        ({"graphs_by_default": True}, "graphs_by_default is set, but there is no record"),
        ({"modules": "rms_norm"}, "modules is 'rms_norm', not a tuple of texts"),
        ({"modules": ("",)}, "not a tuple of texts"),
        ({"out_of_memory": {"(full": "the driver"}}, r"out_of_memory: the pattern '\(full' does not compile"),
        ({"out_of_memory": {7: "the driver"}}, "out_of_memory: 7 is not a pattern"),
        ({"out_of_memory": {"(full)?": "the driver"}}, "fits every error"),
        ({"out_of_memory": {"full": ""}}, "does not say who raises it"),
        ({"chips": ("A1",)}, "chips has a str"),
        ({"chips": (dataclasses.replace(CHIP, arch=""),)}, "a chip has no arch"),
        ({"chips": (dataclasses.replace(CHIP, name="[A"),)}, r"chip a1: the pattern '\[A' does not compile"),
        ({"chips": (dataclasses.replace(CHIP, flops={"float32": 0.0}),)}, "'A1' has a rate that is not above 0"),
        ({"chips": (dataclasses.replace(CHIP, bandwidth=0.0),)}, "'A1' has a bandwidth that is not above 0"),
        ({"chips": (dataclasses.replace(CHIP, source=""),)}, "'A1' has no source"),
    ],
)
def test_the_conformance_suite_refuses(change, complaint, this_host):
    with pytest.raises(AssertionError, match=complaint):
        check_backend(dataclasses.replace(CPU, **change), this_host)


def test_deterministic_mode_is_torchs_and_can_be_left(cpu):
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        cpu.set_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.ones(4).put_(torch.tensor([0, 0]), torch.ones(2))
    finally:
        cpu.set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
