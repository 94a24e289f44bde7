"""Ranges for profilers: torch's, and a vendor's where one is at hand."""

import dataclasses
import inspect
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from hwgrpo_backends import registry
from hwgrpo_backends.device import Device

CPU = registry.get("cpu")


def traced(name):
    """A device of the host that marks ranges as the family `name` does."""
    return Device(dataclasses.replace(CPU, mark=registry.get(name).mark))


@pytest.fixture
def nvtx(monkeypatch):
    said = []
    assert list(inspect.signature(torch.cuda.nvtx.range_push).parameters) == ["msg"]
    assert list(inspect.signature(torch.cuda.nvtx.range_pop).parameters) == []
    monkeypatch.setattr(torch._C, "_nvtx", object(), raising=False)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda msg: said.append(("push", msg)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append(("pop",)))
    return said


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_a_range_is_named_for_the_gpus_profiler_and_closed_when_its_work_fails(name, nvtx):
    with suppress(ZeroDivisionError), traced(name).trace("update {actor}"):
        nvtx.append(("work",))
        raise ZeroDivisionError
    assert nvtx == [("push", "update {actor}"), ("work",), ("pop",)]


def test_a_torch_without_nvtx_is_traced_all_the_same(monkeypatch):
    monkeypatch.delattr(torch._C, "_nvtx", raising=False)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", None)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile as profiler, traced("cuda").trace("update"):
        torch.ones(2).sum()
    assert "update" in {event.key for event in profiler.key_averages()}


def test_a_range_is_named_for_the_npus_profiler(monkeypatch):
    said = []
    marks = SimpleNamespace(
        range_start=lambda msg, stream=None: said.append(("start", msg, stream)) or 7,
        range_end=lambda range_id: said.append(("end", range_id)),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: SimpleNamespace(mstx=marks))
    with pytest.raises(ZeroDivisionError), traced("npu").trace("update"):
        raise ZeroDivisionError
    assert said == [("start", "update", None), ("end", 7)]


def test_a_torch_npu_without_mstx_is_traced_all_the_same(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: SimpleNamespace())
    with traced("npu").trace("update"):
        torch.ones(2).sum()


def test_the_host_processor_has_no_profiler_but_torchs():
    assert {name for name in registry.BUILTIN if registry.get(name).mark} == {"cuda", "rocm", "npu"}
