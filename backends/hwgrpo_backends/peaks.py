"""Peak rates of chips: matrix FLOP/s per dtype, memory and its bandwidth, from vendors' documents. Plain data.

A chip without a row has no peak, nor has a dtype with an uncertain rate: a report then shows n/a. Rates
are those without structured sparsity, with fp32 sums, for one device as torch counts them (one die of AMD's MI250 or
of Ascend's 910C). "tf32" is what fp32 products reach where torch may round their operands.

Compared with copies of the documents they name: A100, A40, L4, L40, L40S, H100 SXM, H20, GH200, GB200, B200, MI350X,
MI355X, 910A, and the bandwidth of MI300X. The other rows and all memory sizes are not compared yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30
T = 1e12
"""Rates below are in TFLOP/s, as data sheets print them."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A row of the table."""

    arch: str
    """As from `Backend.arch`; a prefix where that has further digits."""
    name: str
    """Regular expression for the device's name, which distinguishes chips of one architecture."""
    flops: Mapping[str, float]
    """dtype -> dense matrix FLOP/s; uncertain rates are omitted."""
    bandwidth: float | None
    """Memory bandwidth in B/s; None where it is not certain."""
    source: str
    label: str = ""
    """Readable name; empty: `name`."""
    memory: float | None = None
    """Bytes; None where one name covers editions of different sizes. A vendor's GB are read as GiB, which is
    what memory chips come in and runtimes report but for what the driver keeps."""

    @property
    def title(self) -> str:
        """Return the readable name."""
        return self.label or self.name


@dataclass(frozen=True)
class Peak:
    """The peak rates of a device in one dtype."""

    flops: float
    """FLOP/s."""
    bandwidth: float | None
    """B/s; None where it is not certain."""
    source: str


def find(chips: Sequence[Chip], arch: str, device_name: str) -> Chip | None:
    """Return the first matching row of a device, or None.

    Args:
        chips: a backend's table.
        arch: as from `Backend.arch`.
        device_name: as from the vendor's runtime.
    """
    fitting = (chip for chip in chips if arch.startswith(chip.arch) and re.search(chip.name, device_name))
    return next(fitting, None)


def peak(chips: Sequence[Chip], arch: str, device_name: str, dtype: str | torch.dtype) -> Peak | None:
    """Return the peak rate of a device in `dtype`, or None if unknown.

    Args:
        chips: a backend's table.
        arch: as from `Backend.arch`.
        device_name: as from the vendor's runtime.
        dtype: a torch dtype, its name, or "tf32", which becomes "float32" on chips without it.
    """
    chip = find(chips, arch, device_name)
    if chip is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name == "tf32" and name not in chip.flops:
        name = "float32"
    flops = chip.flops.get(name)
    return None if flops is None else Peak(flops, chip.bandwidth, chip.source)


def describe_chip(chip: Chip | None) -> str:
    """Return a chip's peak rates as text, for a diagnosis."""
    if chip is None:
        return "not known: reports show no share of it"
    rates = ", ".join(f"{name} {flops / T:.4g}" for name, flops in chip.flops.items())
    bandwidth = "n/a" if chip.bandwidth is None else f"{chip.bandwidth / T:.4g} TB/s"
    return f"TFLOP/s: {rates or 'n/a'}; memory {bandwidth} ({chip.source})"


def _rates(*, half: float, tf32: float | None = None, fp32: float | None = None, bf16: bool = True) -> dict[str, float]:
    """Return rates by dtype from TFLOP/s; `half` is that of fp16 and, where the chip has it, of bf16."""
    rates = {"bfloat16": half if bf16 else None, "float16": half, "tf32": tf32, "float32": fp32}
    return {name: rate * T for name, rate in rates.items() if rate is not None}


_V100 = "NVIDIA V100 and V100S data sheets"
_A100 = "NVIDIA A100 data sheet"
_GA102 = "NVIDIA Ampere GA102 GPU architecture white paper"
_ADA = "NVIDIA Ada GPU architecture white paper"
_H100 = "NVIDIA H100 data sheet; its tensor rates are with sparsity, halved here"

# Of the laptop GPUs and export variants that are not here (H800, L20, A10G, ...) no data sheet is at hand.
NVIDIA = (
    Chip(arch="sm_70", name=r"V100S-PCIE", label="V100S PCIe",
         flops=_rates(half=130, fp32=16.4, bf16=False), bandwidth=1134e9, memory=32 * GIB, source=_V100),
    Chip(arch="sm_70", name=r"V100-PCIE", label="V100 PCIe",
         flops=_rates(half=112, fp32=14, bf16=False), bandwidth=900e9, memory=None, source=_V100),
    Chip(arch="sm_70", name=r"V100-SXM2", label="V100 SXM2",
         flops=_rates(half=125, fp32=15.7, bf16=False), bandwidth=900e9, memory=None, source=_V100),
    Chip(arch="sm_75", name=r"\bT4$", label="T4",
         flops=_rates(half=65, fp32=8.1, bf16=False), bandwidth=None, memory=16 * GIB,
         source="NVIDIA T4 data sheet; its editions disagree on the bandwidth"),
    Chip(arch="sm_80", name=r"A[18]00-(SXM4|PCIE)-40GB", label="A100 40GB",
         flops=_rates(half=312, tf32=156, fp32=19.5), bandwidth=1555e9, memory=40 * GIB, source=_A100),
    Chip(arch="sm_80", name=r"A[18]00-SXM4-80GB", label="A100 SXM 80GB",
         flops=_rates(half=312, tf32=156, fp32=19.5), bandwidth=2039e9, memory=80 * GIB, source=_A100),
    Chip(arch="sm_80", name=r"A[18]00 80GB PCIe", label="A100 PCIe 80GB",
         flops=_rates(half=312, tf32=156, fp32=19.5), bandwidth=1935e9, memory=80 * GIB, source=_A100),
    Chip(arch="sm_80", name=r"A30$", label="A30",
         flops=_rates(half=165, tf32=82, fp32=10.3), bandwidth=933e9, memory=24 * GIB,
         source="NVIDIA A30 data sheet"),
    Chip(arch="sm_86", name=r"\bA10$", label="A10",
         flops=_rates(half=125, tf32=62.5, fp32=31.2), bandwidth=600e9, memory=24 * GIB,
         source="NVIDIA A10 data sheet"),
    Chip(arch="sm_86", name=r"\bA40$", label="A40",
         flops=_rates(half=149.7, tf32=74.8, fp32=37.4), bandwidth=696e9, memory=48 * GIB,
         source="NVIDIA A40 data sheet"),
    Chip(arch="sm_86", name=r"RTX A6000$", label="RTX A6000",
         flops=_rates(half=154.8, tf32=77.4, fp32=38.7), bandwidth=768e9, memory=48 * GIB, source=_GA102),
    Chip(arch="sm_86", name=r"RTX 3090$", label="RTX 3090",
         flops=_rates(half=71, tf32=35.6, fp32=35.6), bandwidth=936e9, memory=24 * GIB, source=_GA102),
    Chip(arch="sm_89", name=r"\bL4$", label="L4",
         flops=_rates(half=121, tf32=60, fp32=30.3), bandwidth=300e9, memory=24 * GIB,
         source="NVIDIA L4 data sheet; its tensor rates are with sparsity, halved here"),
    Chip(arch="sm_89", name=r"\bL40S$", label="L40S",
         flops=_rates(half=362.05, tf32=183, fp32=91.6), bandwidth=864e9, memory=48 * GIB,
         source="NVIDIA L40S data sheet"),
    Chip(arch="sm_89", name=r"\bL40$", label="L40",
         flops=_rates(half=181.05, tf32=90.5, fp32=90.5), bandwidth=864e9, memory=48 * GIB,
         source="NVIDIA L40 data sheet"),
    Chip(arch="sm_89", name=r"RTX 4090$", label="RTX 4090",
         flops=_rates(half=165.2, tf32=82.6, fp32=82.6), bandwidth=1008e9, memory=24 * GIB, source=_ADA),
    Chip(arch="sm_90", name=r"H100 PCIe", label="H100 PCIe",
         flops=_rates(half=756.5, tf32=378, fp32=51), bandwidth=2000e9, memory=80 * GIB,
         source="NVIDIA H100 PCIe data sheet; its tensor rates are with sparsity, halved here"),
    Chip(arch="sm_90", name=r"H100 NVL", label="H100 NVL",
         flops=_rates(half=835.5, tf32=417.5, fp32=60), bandwidth=3900e9, memory=94 * GIB, source=_H100),
    Chip(arch="sm_90", name=r"H100 80GB HBM3$", label="H100 SXM",
         flops=_rates(half=989.4, tf32=494.7, fp32=66.9), bandwidth=3350e9, memory=80 * GIB, source=_H100),
    Chip(arch="sm_90", name=r"H200 NVL", label="H200 NVL",
         flops=_rates(half=835.5, tf32=417.5, fp32=60), bandwidth=4800e9, memory=141 * GIB,
         source="NVIDIA H200 data sheet; its tensor rates are with sparsity, halved here"),
    Chip(arch="sm_90", name=r"\bH200$", label="H200 SXM",
         flops=_rates(half=989.4, tf32=494.7, fp32=66.9), bandwidth=4800e9, memory=141 * GIB,
         source="NVIDIA H200 data sheet; its tensor rates are with sparsity, halved here"),
    Chip(arch="sm_90", name=r"GH200 480GB", label="GH200 96GB",
         flops=_rates(half=989.4, tf32=494.7, fp32=66.9), bandwidth=4000e9, memory=96 * GIB,
         source="NVIDIA GH200 data sheet (96 GB of HBM3); its tensor rates are with sparsity, halved here"),
    Chip(arch="sm_90", name=r"GH200 144G HBM3e", label="GH200 144GB",
         flops=_rates(half=989.4, tf32=494.7, fp32=66.9), bandwidth=4900e9, memory=144 * GIB,
         source="NVIDIA GH200 data sheet (144 GB of HBM3e); its tensor rates are with sparsity, halved here"),
    Chip(arch="sm_90", name=r"\bH20$", label="H20",
         flops=_rates(half=148, tf32=74, fp32=44), bandwidth=4000e9, memory=96 * GIB, source="NVIDIA H20 data sheet"),
    Chip(arch="sm_100", name=r"\bGB200$", label="GB200",
         flops=_rates(half=2500, tf32=1250, fp32=80), bandwidth=8000e9, memory=186 * GIB,
         source="NVIDIA GB200 NVL72 data sheet, per GPU; its tensor rates are with sparsity, halved here"),
    Chip(arch="sm_100", name=r"\bB200$", label="B200",
         flops=_rates(half=2250, tf32=1100), bandwidth=None, memory=180 * GIB,
         source="NVIDIA HGX B200 data sheet, per GPU; its tensor rates are with sparsity, halved here; its editions "
                "disagree on fp32 and on the bandwidth"),
    Chip(arch="sm_120", name=r"RTX 5090$", label="RTX 5090",
         flops=_rates(half=209.5, tf32=104.8, fp32=104.8), bandwidth=1792e9, memory=32 * GIB,
         source="NVIDIA RTX Blackwell GPU architecture white paper"),
)  # fmt: skip

_CDNA2 = "AMD Instinct MI200 data sheet, per die; fp32 by matrix cores"
_CDNA3 = "AMD Instinct MI300 data sheet; fp32 by matrix cores"
_CDNA4 = "AMD CDNA 4 white paper: 4096 FLOP per clock and compute unit"

# Some drivers call MI250 and MI250X by one name ("AMD Instinct MI250X / MI250"), which therefore has no row.
AMD = (
    Chip(arch="gfx90a", name=r"MI210$", label="MI210",
         flops=_rates(half=181.0, fp32=45.3), bandwidth=1638e9, memory=64 * GIB, source=_CDNA2),
    Chip(arch="gfx90a", name=r"MI250$(?<!/ MI250)(?<!/MI250)", label="MI250",
         flops=_rates(half=181.05, fp32=45.25), bandwidth=1638e9, memory=64 * GIB, source=_CDNA2),
    Chip(arch="gfx90a", name=r"MI250X$(?<!/ MI250X)(?<!/MI250X)", label="MI250X",
         flops=_rates(half=191.5, fp32=47.85), bandwidth=1638e9, memory=64 * GIB, source=_CDNA2),
    Chip(arch="gfx942", name=r"MI300X$", label="MI300X",
         flops=_rates(half=1307.4, tf32=653.7, fp32=163.4), bandwidth=5300e9, memory=192 * GIB, source=_CDNA3),
    Chip(arch="gfx942", name=r"MI300A$", label="MI300A",
         flops=_rates(half=980.6, tf32=490.3, fp32=122.6), bandwidth=5300e9, memory=128 * GIB, source=_CDNA3),
    Chip(arch="gfx942", name=r"MI325X$", label="MI325X",
         flops=_rates(half=1307.4, tf32=653.7, fp32=163.4), bandwidth=6000e9, memory=256 * GIB,
         source="AMD Instinct MI325X data sheet; fp32 by matrix cores"),
    Chip(arch="gfx950", name=r"MI350X$", label="MI350X",
         flops=_rates(half=2306.9, fp32=144.2), bandwidth=8000e9, memory=288 * GIB, source=_CDNA4),
    Chip(arch="gfx950", name=r"MI355X$", label="MI355X",
         flops=_rates(half=2516.6, fp32=157.3), bandwidth=8000e9, memory=288 * GIB, source=_CDNA4),
    Chip(arch="gfx1100", name=r"RX 7900 XTX$", label="RX 7900 XTX",
         flops=_rates(half=122.8, fp32=61.4), bandwidth=960e9, memory=24 * GIB,
         source="AMD Radeon RX 7900 XTX specification"),
    Chip(arch="gfx1100", name=r"PRO W7900$", label="PRO W7900",
         flops=_rates(half=122.6, fp32=61.3), bandwidth=864e9, memory=48 * GIB,
         source="AMD Radeon PRO W7900 specification"),
)  # fmt: skip

_CUBE = (
    "derived: cube cores and clock of CANN's platform configuration, 8192 FLOP per core and clock (H. Liao et al., "
    "Ascend, HPCA 2021); published figures disagree"
)

# No row: 910B1, whose cores and clock are not at hand; 310P, whose one name stands for cards of different rates; the
# bins of A3 other than the one that was published. fp32 is left out where the vendor gives no rate for matrices.
ASCEND = (
    Chip(arch="ascend910a", name=r"(?i)910A$", label="910A",
         flops=_rates(half=256, bf16=False), bandwidth=1200e9, memory=32 * GIB,
         source="H. Liao et al., Ascend, HPCA 2021"),
    Chip(arch="ascend910b2", name=r"(?i)910B2$", label="910B2",
         flops=_rates(half=24 * 1.8e9 * 8192 / T), bandwidth=1600e9, memory=64 * GIB, source=_CUBE),
    Chip(arch="ascend910b3", name=r"(?i)910B3$", label="910B3",
         flops=_rates(half=20 * 1.8e9 * 8192 / T), bandwidth=1600e9, memory=64 * GIB, source=_CUBE),
    Chip(arch="ascend910b4", name=r"(?i)910B4$", label="910B4",
         flops=_rates(half=20 * 1.5e9 * 8192 / T), bandwidth=None, memory=32 * GIB, source=_CUBE),
    Chip(arch="ascend910_939", name=r"(?i)910_939\d$", label="910C die",
         flops=_rates(half=376), bandwidth=1600e9, memory=64 * GIB,
         source="Huawei, Serving LLMs on CloudMatrix384 (arXiv 2506.12708), per die of 910C"),
)  # fmt: skip
