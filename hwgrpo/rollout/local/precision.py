"""Where bf16 is a gain: on accelerators, and on processors with instructions for it."""

from __future__ import annotations

import re
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")
"""Linux' list of the processor's features."""

BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""x86's two, and Arm's."""


def slow_dtype(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say that sampling in a dtype would be slower than in fp32, or return None.

    Where the processor's features cannot be read nothing is said.
    """
    if device.type != "cpu" or dtype != torch.bfloat16 or not CPUINFO.exists():
        return None
    if BF16_FEATURES & set(re.findall(r"\w+", CPUINFO.read_text())):
        return None
    return (
        "sampling in bfloat16 on a processor without bfloat16 instructions (AMX, AVX512-BF16) is several times slower "
        "than in float32; set rollout.dtype=float32"
    )
