"""Every implementation against the definition of its op, on whatever device is here, in turns within one test.

A ratio is how many times as fast as the op's definition an implementation is on the same device: in processor time on
a CPU, by device events elsewhere. `thresholds.json` says per architecture and dtype how small it may be; what has no
threshold there is recorded, and said so. HWGRPO_PERF_OUT=FOLDER keeps the record (perf.json).
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from hwgrpo_backends.device import Device
from hwgrpo_kernels import Shape, default_registry

from hwgrpo.bench.kernels.cases import CASES, Case
from hwgrpo.bench.kernels.clock import Clock
from hwgrpo.bench.kernels.measure import measure_cases

THRESHOLDS = json.loads((Path(__file__).parent / "thresholds.json").read_text(encoding="utf-8"))
HOST_SHAPE, ACCELERATOR_SHAPE = Shape(64, 64, 32768), Shape(2048, 896, 151936)
REPEAT = 7
ATTEMPTS = 3
"""A ratio below its threshold is measured again before it counts: other work on the machine can spoil one attempt."""


def threshold(arch: str, dtype: str, name: str) -> float | None:
    return THRESHOLDS["ratios"].get(arch, {}).get(dtype, {}).get(name)


def verdict(ratio: float, least: float | None) -> str:
    """Return what is wrong with a ratio, or nothing."""
    return f"{ratio:.2f}x the definition's speed, and {least:.2f}x is the least" if least and ratio < least else ""


def ratios(device: Device, case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Return implementation -> how many times as fast as the definition it is, medians over rounds in turns."""
    shape = HOST_SHAPE if device.backend.is_host else ACCELERATOR_SHAPE
    [bench] = measure_cases(
        device, shape, dtype, [case], REPEAT, Clock(device),
        includes=lambda side: side.group == "ours" or side.name == "definition",
    )  # fmt: skip
    assert bench.baseline == "definition"
    for side in bench.sides:
        assert side.state == "timed", f"{case.name}={side.name}: {side.reason}"
    return {side.name: side.ratio for side in bench.sides if side.group == "ours" and side.ratio is not None}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_implementation_is_slower_than_its_threshold(case: Case, device: Device, record: dict[str, Any]):
    dtype = next(dtype for dtype in device.compute_dtypes if case.applies(dtype))
    in_words = str(dtype).removeprefix("torch.")
    attempts: dict[str, list[float]] = {}
    for _ in range(ATTEMPTS):
        for name, ratio in ratios(device, case, dtype).items():
            attempts.setdefault(f"{case.name}={name}", []).append(ratio)
        least = {name: threshold(record["arch"], in_words, name) for name in attempts}
        if not any(verdict(max(found), least[name]) for name, found in attempts.items()):
            break
    assert attempts, f"no implementation of {case.name} can run here"
    for name, found in attempts.items():
        record["ratios"][name] = {
            "dtype": in_words, "ratio": median(found), "attempts": found, "threshold": least[name],
        }  # fmt: skip
        if least[name] is None:
            told = f"{name}: no threshold for {record['arch']} in {in_words}; recorded {median(found):.2f}x"
            warnings.warn(told, stacklevel=1)
    slow = {name: fault for name, found in attempts.items() if (fault := verdict(max(found), least[name]))}
    assert not slow, slow


def test_every_declared_op_has_a_case():
    decoding = {"block_sums", "kept_sums", "pick", "decode_attention", "swiglu"}  # decode profiles time them
    assert {op.name for op in default_registry.ops()} <= {case.name for case in CASES} | decoding


def test_thresholds_name_cases_and_are_ratios():
    names = {case.name for case in CASES}
    for arch, dtypes in THRESHOLDS["ratios"].items():
        for dtype, least in dtypes.items():
            assert isinstance(getattr(torch, dtype), torch.dtype), arch
            assert {name.split("=")[0] for name in least} <= names
            assert all(0 < ratio < 100 for ratio in least.values())


def test_a_ratio_below_its_threshold_is_a_fault_and_one_without_threshold_is_not():
    assert verdict(1.9, 2.0)
    assert not verdict(2.0, 2.0)
    assert not verdict(0.1, None)
    assert threshold("no such chip", "float32", "row_stats=torch") is None
