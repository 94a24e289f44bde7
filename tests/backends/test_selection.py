"""Choosing for a process: torch is asked exactly when it could change the answer."""

import dataclasses

import pytest
from hwgrpo_backends import selection
from hwgrpo_backends.backend import BackendError
from hwgrpo_backends.facts import Facts, TorchDevice, TorchFacts

PLAIN = Facts(torch_version="2.13.0+cpu", torch_build="cpu")
GPU = Facts(torch_version="2.13.0", torch_build="cuda", device_nodes=("nvidia0",))


@pytest.fixture
def on(monkeypatch):
    """Return a function that puts this process on a host, and the list of times torch was asked."""
    asked = []

    def place(facts, device=None):
        def tier1(facts, *_):
            asked.append(facts)
            torch = TorchFacts(imported=True, version=facts.torch_version, devices={"cuda": device or TorchDevice()})
            return dataclasses.replace(facts, torch=torch)

        monkeypatch.setattr(selection, "gather_tier0", lambda **_: facts)
        monkeypatch.setattr(selection, "gather_tier1", tier1)
        return asked

    return place


def test_a_plain_cpu_host_is_decided_without_starting_a_child(on):
    asked = on(PLAIN)
    assert selection.choose().backend.name == "cpu"
    assert asked == []


def test_a_host_with_a_gpu_asks_torch(on):
    asked = on(GPU, TorchDevice(available=True, count=1, names=("H100",)))
    choice = selection.choose()
    assert choice.backend.name == "cuda"
    assert choice.decision.verdicts["cuda"].state == "ok"
    assert len(asked) == 1


def test_a_gpu_that_only_seemed_usable_is_refused_after_asking(on):
    on(GPU)
    with pytest.raises(BackendError, match="torch cannot use it"):
        selection.choose()


def test_an_installed_torch_plug_in_is_always_tried(on):
    asked = on(dataclasses.replace(PLAIN, torch_plugins=("torch_npu",)))
    selection.choose("cpu")
    assert len(asked) == 1


def test_the_cpu_asked_for_beside_a_gpu_needs_no_child(on):
    asked = on(GPU)
    assert selection.choose("cpu").backend.name == "cpu"
    assert asked == []


def test_a_worker_inherits_without_a_child(on):
    asked = on(dataclasses.replace(GPU, variables={"HWGRPO_BACKEND_SELECTED": "cuda"}))
    choice = selection.choose()
    assert choice.backend.name == "cuda"
    assert choice.decision.inherited
    assert asked == []


def test_warnings_are_logged_once(on, caplog):
    on(dataclasses.replace(PLAIN, device_nodes=("nvidia0",)))
    assert selection.choose().backend.name == "cpu"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "install a CUDA build" in caplog.text


def test_a_typo_is_refused_before_anything_is_tried(on):
    asked = on(GPU)
    with pytest.raises(BackendError, match="Did you mean 'cuda'"):
        selection.choose("cudda")
    assert asked == []
