"""bf16 on chips that lack it: refused by name where it was asked for, and fp32 in its place where nothing was."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hwgrpo_backends import registry
from hwgrpo_backends.device import Device

from hwgrpo.errors import ConfigError
from hwgrpo.training.policy.auto_settings import choose_dtype, dtype_note

CHIPS = {
    "V100": ("cuda", "Tesla V100-SXM2-32GB", (7, 0)),
    "T4": ("cuda", "Tesla T4", (7, 5)),
    "910A": ("npu", "Ascend910A", False),
    "310P": ("npu", "Ascend310P3", False),
    "A100": ("cuda", "NVIDIA A100-SXM4-80GB", (8, 0)),
    "910B": ("npu", "Ascend910B3", True),
}
WITHOUT, WITH = ("V100", "T4", "910A", "310P"), ("A100", "910B")


@pytest.fixture
def device_of(monkeypatch):
    def make(chip):
        family, name, ability = CHIPS[chip]
        module = SimpleNamespace(device_count=lambda: 1, get_device_name=lambda index: name)
        if family == "npu":
            module.is_bf16_supported = lambda: ability
        monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ability)
        backend = registry.get(family)
        if backend.plugin:  # a torch without the plug-in knows no such device by name
            backend = dataclasses.replace(backend, plugin=None, device_type="privateuseone")
        return Device(backend)

    return make


@pytest.mark.parametrize("chip", WITHOUT)
def test_bf16_asked_for_where_there_is_none_is_refused_with_the_chips_name_and_what_it_has(device_of, chip):
    with pytest.raises(ConfigError) as caught:
        choose_dtype("bfloat16", device_of(chip))
    message = str(caught.value)
    assert message.startswith("model.dtype='bfloat16'")
    assert CHIPS[chip][1] in message
    assert message.endswith("choose auto or one of: float32")


@pytest.mark.parametrize("chip", WITHOUT)
def test_where_nothing_is_asked_for_such_a_chip_trains_in_fp32(device_of, chip):
    device = device_of(chip)
    assert torch.float16 in device.compute_dtypes, "which the trainer, without loss scaling, does not take"
    assert choose_dtype("auto", device) is torch.float32
    note = dtype_note("auto", device)
    assert note is not None
    assert note.startswith(f"model.dtype=auto is float32: {CHIPS[chip][1]} has no bfloat16")
    assert dtype_note("float32", device) is None


@pytest.mark.parametrize("chip", WITH)
def test_chips_that_have_it_train_in_bf16(device_of, chip):
    assert dtype_note("auto", device_of(chip)) is None
    assert choose_dtype("auto", device_of(chip)) is torch.bfloat16
    assert choose_dtype("bfloat16", device_of(chip)) is torch.bfloat16
