"""The conformance suite finds faults that are planted in the backend of the host processor.

tests/simulated_npu/on_device/test_conformance.py has those of a device with memory, streams and a visibility variable.
"""

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hwgrpo_backends import device as device_layer
from hwgrpo_backends import registry
from hwgrpo_backends.backend import Verdict
from hwgrpo_backends.conformance_processes import check_collectives
from hwgrpo_backends.device import Device, Memory
from hwgrpo_backends.testing import check_backend

CPU = registry.get("cpu")
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
)


def two_processors(facts: Any) -> Verdict:
    verdict = CPU.probe(facts)
    return dataclasses.replace(verdict, devices=2 * verdict.devices)


def test_the_host_processor_passes_and_its_memory_is_declared_as_not_measured(this_host):
    assert not Device(CPU).measures_memory
    dtypes = [str(dtype).removeprefix("torch.") for dtype in CPU.compute_dtypes(0)]
    assert check_backend(CPU, this_host) == [
        "data",
        "names: kernels, modules, attention, rollout",
        "probe",
        f"device: {Device(CPU).name} ({Device(CPU).arch})",
        "memory: not measured, the device is the host processor",
        "visible devices: not checked, the backend names no variable",
        f"collectives: {', '.join(COLLECTIVES)} in {', '.join(dtypes)} by gloo over 2 ranks",
    ]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"comm": "glo"}, "comm is 'glo', which torch.distributed does not have here, but .*gloo"),
        ({"comm": "nccl"}, "comm is 'nccl', which torch.distributed does not have here"),
        ({"visible_env": "CPU_VISIBLE_DEVICES"}, "visible_env is 'CPU_VISIBLE_DEVICES': the host processor has no"),
        ({"kernels": ("torhc", "torch")}, "kernels has 'torhc', which is not registered: use compiled, "),
        ({"kernels": ("triton", "torch")}, "kernels has 'triton', which has no implementation for cpu"),
        ({"attention": ("sdpa2", "eager")}, "attention has 'sdpa2', which hwgrpo does not know"),
        ({"attention": ("npu_fusion_attention",)}, "attention has 'npu_fusion_attention', which hwgrpo does not know"),
        ({"rollout": ("locl",)}, "rollout has 'locl', which hwgrpo does not know: use auto, local, .*vllm"),
        ({"modules": ("rms_norm",)}, "modules has 'rms_norm', which cpu does not have: use none"),
        ({"device_type": "cuda"}, "device_type='cuda' cannot be opened"),
        ({"probe": two_processors}, "probe counts 2 devices and torch 1"),
        ({"compute_dtypes": lambda index: (torch.float8_e8m0fnu, torch.float32)}, "matmul in torch.float8_e8m0fnu"),
        ({"compute_dtypes": lambda index: ("bfloat16", "float32")}, "compute_dtypes has 'bfloat16', no dtype"),
        ({"compute_dtypes": lambda index: ()}, "compute_dtypes is empty"),
        ({"compute_dtypes": lambda index: {}[index]}, "compute_dtypes: KeyError: 0"),
    ],
)
def test_a_wrong_field_is_found(change: dict[str, Any], complaint: str, this_host):
    with pytest.raises(AssertionError, match=complaint):
        check_backend(dataclasses.replace(CPU, **change), this_host)


@pytest.mark.parametrize(
    ("call", "planted", "complaint"),
    [
        ("set_rng_state", lambda *arguments: None, "set_rng_state does not restore"),
        ("get_rng_state", lambda *arguments: torch.zeros(8), "rng_state is torch.float32"),
        ("stream", staticmethod(contextlib.nullcontext), r"stream\(\) leaves another stream the current one"),
        ("get_device_name", lambda *arguments: "", "name is empty"),
    ],
)
def test_a_wrong_runtime_call_is_found(call, planted, complaint, this_host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_layer._HostModule, call, planted)
    with pytest.raises(AssertionError, match=complaint):
        check_backend(CPU, this_host)


def test_products_that_are_off_are_found(this_host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: torch.mm(a, b) * (1 + (a.dtype != torch.float64) / 10))
    with pytest.raises(AssertionError, match=r"matmul in torch.float32: relative error 0\.1"):
        check_backend(CPU, this_host)


def test_tied_weights_that_a_move_unties_are_found(this_host, monkeypatch: pytest.MonkeyPatch):
    module = torch.nn.Module

    def to(self: torch.nn.Module, device: Any) -> torch.nn.Module:
        for child in self.children():
            child.weight = torch.nn.Parameter(child.weight.detach().clone())
        return self

    monkeypatch.setattr(module, "to", to)
    with pytest.raises(AssertionError, match="unties tied weights"):
        check_backend(CPU, this_host)


def test_memory_figures_of_a_device_that_declares_none_are_found(this_host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Device, "memory", lambda self: Memory(free=0, total=0, allocated=0, peak=0))
    with pytest.raises(AssertionError, match="of a device without memory to measure"):
        check_backend(CPU, this_host)


def test_each_collective_that_does_nothing_in_one_dtype_is_found(monkeypatch: pytest.MonkeyPatch):
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))))
    backend = dataclasses.replace(
        CPU,
        plugin="tests.backends.idle_collectives",
        compute_dtypes=lambda index: (torch.float32, torch.bfloat16),
    )
    with pytest.raises(AssertionError, match="comm='gloo' on cpu, rank 0 of 2: ") as raised:
        check_collectives(backend, 1)
    for name in COLLECTIVES:
        assert f"{name} in bfloat16 gives [" in str(raised.value)
    assert "float32" not in str(raised.value)


def test_names_are_not_looked_up_where_their_package_cannot_be_imported(this_host, monkeypatch: pytest.MonkeyPatch):
    npu = dataclasses.replace(registry.get("npu"), rollout=("locl",), kernels=("torhc", "torch"))
    monkeypatch.setitem(sys.modules, "hwgrpo.catalog", None)
    with pytest.raises(AssertionError, match="kernels has 'torhc'"):
        check_backend(npu, this_host)
    monkeypatch.setitem(sys.modules, "hwgrpo_kernels.registry", None)
    names = check_backend(npu, this_host)[1]
    assert names.startswith("names: modules, attention; kernels not checked, import of hwgrpo_kernels.registry ")
    assert "; rollout not checked, import of hwgrpo.catalog " in names
