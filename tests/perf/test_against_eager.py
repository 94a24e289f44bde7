"""`token_logprob` at a real vocabulary against eager torch (log_softmax, gather, entropy, autograd), in turns.

Speed is a multiple of eager's on the same device, memory beyond inputs and results a share of eager's.
`thresholds.json` has two figures for each: what must be held (`floor`, `ceiling`), and the `goal`, of which the tests
say whether it is reached. What has no threshold for this architecture is recorded, and said so.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hwgrpo_backends.device import Device
from hwgrpo_kernels import Shape
from hwgrpo_kernels.overview import survey

from hwgrpo.bench.kernels.cases import CASES, Case
from hwgrpo.bench.kernels.clock import Clock
from hwgrpo.bench.kernels.kernel_result import SideBench
from hwgrpo.bench.kernels.measure import measure_cases
from hwgrpo.bench.kernels.peak import can_measure_host, host_peaks
from hwgrpo.bench.kernels.sides import our_choices

BARS = json.loads((Path(__file__).parent / "thresholds.json").read_text(encoding="utf-8"))["against_eager"]["bars"]
HOST_SHAPE, ACCELERATOR_SHAPE = Shape(128, 1, 151936), Shape(2048, 1, 151936)
"""With fewer rows than 64 glibc keeps eager's temporaries on a CPU, which then cost it no pages."""
REPEAT = 5
ATTEMPTS = 3
"""A ratio below its floor is measured again before it counts: other work on the machine can spoil one attempt."""
FROM_LOGITS = [case for case in CASES if case.name in ("token_logprob", "token_logprob+grad")]

Bar = Mapping[str, float]


def verdict(found: float, bar: Bar | None) -> str:
    """Return what is wrong with a speed or a share of memory, or nothing."""
    if bar is not None and found < bar.get("floor", 0.0):
        return f"{found:.2f}x eager's speed, and {bar['floor']:.2f}x is the least"
    if bar is not None and found > bar.get("ceiling", float("inf")):
        return f"{found:.3f} of eager's memory, and {bar['ceiling']} is the most"
    return ""


def in_words(found: float, bar: Bar | None) -> str:
    """Return a speed or a share of memory beside what must be held and what is aimed at."""
    if bar is None:
        return f"{found:.3g} (no threshold)"
    if "floor" in bar:
        held, reached = f"floor {bar['floor']}", found >= bar["goal"]
    else:
        held, reached = f"ceiling {bar['ceiling']}", found < bar["goal"]
    return f"{found:.3g} ({held}, goal {bar['goal']}: {'reached' if reached else 'NOT REACHED'})"


def bars(device: Device, dtype: torch.dtype) -> Mapping[str, Mapping[str, Bar]]:
    """Return implementation -> bars of "speed" and "memory" here."""
    return BARS.get(device.arch, {}).get(str(dtype).removeprefix("torch."), {})


def tell(name: str, what: str, found: float, bar: Bar | None, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n  {name}, {what} against eager: {in_words(found, bar)}", end="")
    if bar is None:
        warnings.warn(f"{name}: no threshold of its {what} here; recorded {found:.3g}", stacklevel=2)


def measured(device: Device, case: Case, dtype: torch.dtype) -> dict[str, SideBench]:
    """Measure our implementations and eager torch."""
    shape = HOST_SHAPE if device.backend.is_host else ACCELERATOR_SHAPE
    [bench] = measure_cases(
        device, shape, dtype, [case], REPEAT, Clock(device),
        includes=lambda side: side.group == "ours" or side.name == "eager",
    )  # fmt: skip
    assert bench.baseline == "eager"
    for side in bench.sides:
        assert side.state == "timed", f"{case.name}={side.name}: {side.reason}"
    return {side.name: side for side in bench.sides}


def extra_memory(device: Device, dtype: torch.dtype) -> dict[tuple[str, str], int]:
    """Return (case, side) -> bytes beyond inputs and results; nothing where they cannot be counted."""
    if not device.backend.is_host:
        counted = {case.name: measured(device, case, dtype) for case in FROM_LOGITS}
        peaks = {(case, side): each.peak_bytes for case, sides in counted.items() for side, each in sides.items()}
        return {name: peak for name, peak in peaks.items() if peak is not None}
    if not can_measure_host():
        return {}
    tensors = (device.torch_device.type, dtype, HOST_SHAPE.V)
    ours = [(case.name, name) for case in FROM_LOGITS for name, *_ in our_choices(case.ops, tensors)]
    return host_peaks(HOST_SHAPE, dtype, [*ours, *((case.name, "eager") for case in FROM_LOGITS)])


@pytest.mark.slow
@pytest.mark.parametrize("case", FROM_LOGITS, ids=lambda case: case.name)
def test_token_logprob_is_as_many_times_as_fast_as_eager_torch_as_its_floor_says(
    case: Case, device: Device, record: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    dtype = device.compute_dtypes[0]
    known = {name: bar["speed"] for name, bar in bars(device, dtype).items() if name.startswith(f"{case.name}=")}
    attempts: dict[str, list[float]] = {}
    for _ in range(ATTEMPTS):
        for name, side in measured(device, case, dtype).items():
            if side.group == "ours" and side.ratio is not None:
                attempts.setdefault(f"{case.name}={name}", []).append(side.ratio)
        slow = {name: fault for name, found in attempts.items() if (fault := verdict(max(found), known.get(name)))}
        if not slow:
            break
    assert attempts, f"no implementation of {case.name} can run here"
    for name, found in attempts.items():
        record["against_eager"].setdefault(name, {})["speed"] = {"attempts": found, "bar": known.get(name)}
        tell(name, "speed", max(found), known.get(name), capsys)
    reasons = {each.name: each.reason for op in survey(device.backend.device_type, dtype, HOST_SHAPE.V)
               if op.op in case.ops for each in op.verdicts}  # fmt: skip
    for name in set(known) - set(attempts):
        warnings.warn(f"{name} is not measured here: {reasons.get(name.split('=')[1])}", stacklevel=1)
    assert not slow, slow


def test_token_logprob_takes_a_small_share_of_the_memory_that_eager_torch_takes(
    device: Device, record: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    dtype = device.compute_dtypes[0]
    peaks = extra_memory(device, dtype)
    if not peaks:
        warnings.warn("memory is not measured: nothing here counts the most that was taken", stacklevel=1)
    faults = {}
    for (case, side), peak in peaks.items():
        if side == "eager":
            continue
        name, share = f"{case}={side}", peak / peaks[case, "eager"]
        bar = bars(device, dtype).get(name, {}).get("memory")
        record["against_eager"].setdefault(name, {})["memory"] = {"bytes": peak, "share": share, "bar": bar}
        tell(name, "memory", share, bar, capsys)
        faults |= {name: fault} if (fault := verdict(share, bar)) else {}
    assert not faults, faults


def test_thresholds_name_cases_from_logits_and_have_a_goal_beside_what_is_held():
    for arch, dtypes in BARS.items():
        for dtype, sides in dtypes.items():
            assert isinstance(getattr(torch, dtype), torch.dtype), arch
            assert {name.split("=")[0] for name in sides} == {case.name for case in FROM_LOGITS}
            for bar in sides.values():
                assert (set(bar["speed"]), set(bar["memory"])) == ({"floor", "goal"}, {"ceiling", "goal"})
                assert 1 < bar["speed"]["floor"] < 100
                assert 0 < bar["memory"]["ceiling"] <= bar["memory"]["goal"] < 1


def test_a_speed_below_its_floor_and_a_share_above_its_ceiling_are_faults():
    speed, memory = {"floor": 3.0, "goal": 5.0}, {"ceiling": 0.1, "goal": 0.25}
    assert verdict(2.9, speed)
    assert not verdict(3.0, speed)
    assert verdict(0.11, memory)
    assert not verdict(0.1, memory)
    assert not verdict(0.0, None)


def test_a_goal_is_told_beside_what_is_held_and_whether_it_is_reached():
    speed, memory = {"floor": 3.0, "goal": 5.0}, {"ceiling": 0.1, "goal": 0.25}
    assert in_words(4.567, speed) == "4.57 (floor 3.0, goal 5.0: NOT REACHED)"
    assert in_words(5.0, speed) == "5 (floor 3.0, goal 5.0: reached)"
    assert in_words(0.25, memory) == "0.25 (ceiling 0.1, goal 0.25: NOT REACHED)"
    assert in_words(0.02, memory) == "0.02 (ceiling 0.1, goal 0.25: reached)"
    assert in_words(2.0, None) == "2 (no threshold)"
