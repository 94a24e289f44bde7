"""What chips do at most: looked up by architecture and name, and nothing is made up for a chip without a row."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hwgrpo_backends import registry
from hwgrpo_backends.device import Device
from hwgrpo_backends.peaks import AMD, ASCEND, NVIDIA, Chip, describe_chip, find, peak

KNOWN = [
    ("sm_70", "Tesla V100-SXM2-32GB", "float16", 125e12, 900e9),
    ("sm_70", "Tesla V100S-PCIE-32GB", "float16", 130e12, 1134e9),
    ("sm_80", "NVIDIA A100-SXM4-40GB", "bfloat16", 312e12, 1555e9),
    ("sm_80", "NVIDIA A100-SXM4-80GB", "bfloat16", 312e12, 2039e9),
    ("sm_80", "NVIDIA A100 80GB PCIe", "tf32", 156e12, 1935e9),
    ("sm_80", "NVIDIA A800-SXM4-80GB", "bfloat16", 312e12, 2039e9),
    ("sm_86", "NVIDIA A10", "bfloat16", 125e12, 600e9),
    ("sm_89", "NVIDIA L4", "bfloat16", 121e12, 300e9),
    ("sm_89", "NVIDIA L40S", "bfloat16", 362.05e12, 864e9),
    ("sm_89", "NVIDIA GeForce RTX 4090", "float16", 165.2e12, 1008e9),
    ("sm_90", "NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12, 3350e9),
    ("sm_90", "NVIDIA H100 PCIe", "bfloat16", 756.5e12, 2000e9),
    ("sm_90", "NVIDIA H200", "bfloat16", 989.4e12, 4800e9),
    ("sm_90", "NVIDIA GH200 480GB", "float32", 66.9e12, 4000e9),
    ("sm_90", "NVIDIA H20", "bfloat16", 148e12, 4000e9),
    ("sm_100", "NVIDIA B200", "bfloat16", 2250e12, None),
    ("sm_100", "NVIDIA B200", "tf32", 1100e12, None),
    ("sm_100", "NVIDIA GB200", "bfloat16", 2500e12, 8000e9),
    ("gfx90a", "AMD Instinct MI210", "bfloat16", 181e12, 1638e9),
    ("gfx90a", "AMD Instinct MI250X", "bfloat16", 191.5e12, 1638e9),
    ("gfx90a", "AMD Instinct MI250", "bfloat16", 181.05e12, 1638e9),
    ("gfx942", "AMD Instinct MI300X", "bfloat16", 1307.4e12, 5300e9),
    ("gfx942", "AMD Instinct MI300A", "bfloat16", 980.6e12, 5300e9),
    ("gfx942", "AMD Instinct MI325X", "tf32", 653.7e12, 6000e9),
    ("gfx950", "AMD Instinct MI355X", "bfloat16", 2516.6e12, 8000e9),
    ("gfx1100", "AMD Radeon RX 7900 XTX", "bfloat16", 122.8e12, 960e9),
    ("ascend910a", "Ascend910A", "float16", 256e12, 1200e9),
    ("ascend910b3", "Ascend910B3", "bfloat16", 294.912e12, 1600e9),
    ("ascend910b4", "Ascend910B4", "bfloat16", 245.76e12, None),
    ("ascend910_9391", "Ascend910_9391", "bfloat16", 376e12, 1600e9),
]
UNKNOWN = [
    ("sm_90", "NVIDIA H800"),
    ("sm_90", "NVIDIA H100 SXM5 MIG 1g.10gb"),
    ("sm_90", "NVIDIA H200 MIG 1g.18gb"),
    ("sm_90", "NVIDIA H20-3e"),
    ("sm_86", "NVIDIA A10G"),
    ("sm_86", "NVIDIA GeForce RTX 3090 Ti"),
    ("sm_89", "NVIDIA GeForce RTX 4090 Laptop GPU"),
    ("sm_80", "NVIDIA H100 PCIe"),
    ("gfx90a", "AMD Instinct MI250X / MI250"),
    ("gfx90a", "AMD Instinct MI250X/MI250"),
    ("gfx942", "AMD Instinct MI308X"),
    ("ascend910b1", "Ascend910B1"),
    ("ascend310p3", "Ascend310P3"),
    ("ascend910_9362", "Ascend910_9362"),
    ("x86_64-avx512", "x86_64"),
]


@pytest.mark.parametrize(("arch", "name", "dtype", "flops", "bandwidth"), KNOWN)
def test_a_chip_is_found_by_its_architecture_and_name(arch, name, dtype, flops, bandwidth):
    found = peak(NVIDIA + AMD + ASCEND, arch, name, dtype)
    assert found is not None
    assert (found.flops, found.bandwidth) == (pytest.approx(flops), bandwidth)
    assert found.source


@pytest.mark.parametrize(("arch", "name"), UNKNOWN)
def test_a_chip_without_a_row_has_no_peak(arch, name):
    assert peak(NVIDIA + AMD + ASCEND, arch, name, "float32") is None
    assert find(NVIDIA + AMD + ASCEND, arch, name) is None


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-16GB", "Ascend910A"])
def test_chips_without_bf16_have_no_rate_in_it(name):
    arch = "sm_70" if "V100" in name else "ascend910a"
    assert peak(NVIDIA + ASCEND, arch, name, torch.bfloat16) is None
    assert peak(NVIDIA + ASCEND, arch, name, torch.float16) is not None


def test_no_device_name_fits_two_rows():
    for arch, name, *_ in KNOWN:
        fitting = [chip for chip in NVIDIA + AMD + ASCEND if find([chip], arch, name)]
        assert len(fitting) == 1, (name, fitting)


def test_every_row_is_in_plausible_bounds_and_names_its_source():
    for chip in NVIDIA + AMD + ASCEND:
        assert chip.source
        assert chip.bandwidth is None or 2e11 < chip.bandwidth < 1e13
        assert all(8e12 <= flops < 3e15 for flops in chip.flops.values()), chip
        half, full = chip.flops["float16"], chip.flops.get("float32", 0)
        assert full <= chip.flops.get("tf32", half) <= half


def test_only_accelerators_have_a_table():
    tables = {name: registry.get(name).chips for name in registry.BUILTIN}
    assert tables == {"cpu": (), "cuda": NVIDIA, "rocm": AMD, "npu": ASCEND}
    assert Device(registry.get("cpu")).peak(torch.float32) is None


@pytest.fixture
def device(monkeypatch):
    """A chip of a vendor outside the tree, with a table of its own."""
    row = Chip(
        arch="acme2", name="Anvil", flops={"float32": 1e12, "tf32": 4e12}, bandwidth=None, source="its catalogue"
    )
    module = SimpleNamespace(device_count=lambda: 1, get_device_name=lambda index: "Anvil 9")
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)
    base = registry.get("cpu")
    return Device(
        dataclasses.replace(base, name="acme", device_type="privateuseone", arch=lambda _: "acme2", chips=(row,))
    )


def test_fp32_products_that_may_be_rounded_are_held_against_the_faster_rate(device, monkeypatch):
    assert device.peak(torch.float32).flops == 1e12
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert device.peak(torch.float32).flops == 4e12
    assert device.peak(torch.bfloat16) is None


def test_chips_without_tf32_multiply_fp32_as_it_is():
    assert peak(AMD, "gfx950", "AMD Instinct MI355X", "tf32") == peak(AMD, "gfx950", "AMD Instinct MI355X", "float32")


def test_a_chip_is_described_with_its_peak_rates():
    row = find(NVIDIA, "sm_90", "NVIDIA H200")
    text = describe_chip(row)
    assert text.startswith("TFLOP/s: bfloat16 989.4, float16 989.4, tf32 494.7, float32 66.9; memory 4.8 TB/s (")
    assert "not known" in describe_chip(None)
