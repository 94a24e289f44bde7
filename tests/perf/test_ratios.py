"""Every implementation against the definition of its op, on whatever device is here, in turns within one test.

A ratio is how many times as fast as the op's definition an implementation is on the same device: in processor time on
a CPU, by device events elsewhere. `thresholds.json` says per architecture and dtype how small it may be; what has no
threshold there is recorded, and said so. HWGRPO_PERF_OUT=FOLDER keeps the record (perf.json).
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from hwgrpo_backends import choose
from hwgrpo_backends.device import Device
from hwgrpo_kernels import Shape, default_registry

from hwgrpo.bench.kernels.cases import CASES, Case
from hwgrpo.bench.kernels.clock import Clock, median_ratio
from hwgrpo.bench.kernels.exact import LinearTruth, LogitsTruth
from hwgrpo.bench.kernels.measure import check
from hwgrpo.bench.kernels.problem import linear_problem, logits_problem
from hwgrpo.bench.kernels.result import SideBench
from hwgrpo.bench.times import turns

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


@pytest.fixture(scope="module")
def device() -> Device:
    torch.set_num_threads(1)
    device = Device(choose().backend)
    device.set_device()
    return device


@pytest.fixture(scope="module")
def record(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Ratios by case and implementation, written to perf.json when the last is there."""
    found = {
        "schema": "hwgrpo.perf/1",
        "arch": device.arch,
        "device": device.name,
        "torch": torch.__version__,
        "ratios": {},
    }
    yield found
    folder = Path(os.environ.get("HWGRPO_PERF_OUT") or tmp_path_factory.mktemp("perf"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "perf.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"\nratios of {found['arch']}: {folder / 'perf.json'}")


def ratios(device: Device, case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Return implementation -> how many times as fast as the definition it is, medians over rounds in turns."""
    shape = HOST_SHAPE if device.backend.is_host else ACCELERATOR_SHAPE
    linear = case.kind == "linear"
    problem: Any = (linear_problem if linear else logits_problem)(shape, dtype, device.torch_device)
    truth = LinearTruth(problem) if linear else LogitsTruth(problem)
    clock = Clock(device)
    sides = [side for side in case.sides(case, problem) if side.group == "ours" or side.name == "definition"]
    benches = [SideBench(side.name, side.group, "timed", clock.samples()) for side in sides]
    for side, bench in zip(sides, benches, strict=True):
        check(device, case, side, bench, truth)  # its warm-up, too
        assert bench.state == "timed", f"{case.name}={side.name}: {bench.reason}"
    for number in range(REPEAT):
        for side, bench in turns(list(zip(sides, benches, strict=True)), number):
            assert side.work is not None
            with side.in_force():
                clock.measure(bench.samples, side.work)
    base = next(bench for bench in benches if bench.name == "definition")
    found = {bench.name: median_ratio(base.samples, bench.samples) for bench in benches if bench.group == "ours"}
    return {name: ratio for name, ratio in found.items() if ratio is not None}


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
    assert {op.name for op in default_registry.ops()} <= {case.name for case in CASES}


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
