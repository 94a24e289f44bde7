"""Measure all cases at all shapes in one run: compare every side with fp64, then time the sides in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from hwgrpo_backends.device import Device
from hwgrpo_kernels import Shape
from hwgrpo_kernels.overview import survey

from hwgrpo.bench.kernels.cases import Case, fault
from hwgrpo.bench.kernels.ceiling import CeilingMeter, gemm_rows
from hwgrpo.bench.kernels.clock import Clock, median_ratio
from hwgrpo.bench.kernels.exact import TRUTHS, Truth
from hwgrpo.bench.kernels.kernel_result import CaseBench, KernelBench, ShapeBench, SideBench
from hwgrpo.bench.kernels.peak import can_measure_host, device_peak, host_peaks
from hwgrpo.bench.kernels.peers import PEERS
from hwgrpo.bench.kernels.problem import PROBLEMS
from hwgrpo.bench.kernels.sides import Side
from hwgrpo.bench.machine import machine_facts
from hwgrpo.bench.times import turns

BASELINES = ("eager", "definition")
"""Baselines of the ratios; the first that was timed is used."""


@dataclass
class _Entry:
    """A side and its measurements."""

    side: Side
    bench: SideBench


def measure_kernels(
    device: Device,
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    cases: Sequence[Case],
    repeat: int,
    *,
    memory: bool = True,
    report: Callable[[str], None] = lambda _: None,
) -> KernelBench:
    """Measure cases at shapes.

    Args:
        device: device to run on.
        shapes: name -> shape.
        dtype: of hidden states, head and logits.
        cases: from `CASES`.
        repeat: timed rounds, after one warm-up round.
        memory: measure peak host memory, in another process that runs everything once more.
        report: called with a line before each stage.
    """
    facts = machine_facts(device)  # before this process adds load
    clock = Clock(device)
    meter = CeilingMeter(device, dtype, clock)
    report("the ceilings")
    meter()
    shape_benches = [
        _measure_shape(device, name, shape, dtype, cases, repeat, clock, meter, report)
        for name, shape in shapes.items()
    ]
    peak_source = "the device's allocator"
    if device.backend.is_host:
        peak_source = _add_host_peaks(shape_benches, dtype, report) if memory else "not measured: switched off"
    report("the ceilings again")
    meter()
    return KernelBench(
        machine=facts | {"threads": torch.get_num_threads()},
        peers={each.distribution: each.version for each in PEERS},
        dtype=str(dtype).removeprefix("torch."),
        clock=clock.name,
        repeat=repeat,
        ceiling=meter.ceiling,
        shapes=shape_benches,
        peak=peak_source,
        not_here=_not_here(device, dtype, max(shape.V for shape in shapes.values())),
    )


def _measure_shape(
    device: Device,
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    cases: Sequence[Case],
    repeat: int,
    clock: Clock,
    meter: CeilingMeter,
    report: Callable[[str], None],
) -> ShapeBench:
    report(f"{name}: the GEMM of the logits")
    gemm = meter.shape(shape)
    benches = measure_cases(device, shape, dtype, cases, repeat, clock, report=lambda text: report(f"{name}: {text}"))
    return ShapeBench(name, shape, gemm, 2 * gemm_rows(shape, dtype) * shape.H * shape.V, benches)


def measure_cases(
    device: Device,
    shape: Shape,
    dtype: torch.dtype,
    cases: Sequence[Case],
    repeat: int,
    clock: Clock,
    *,
    includes: Callable[[Side], bool] = lambda _: True,
    report: Callable[[str], None] = lambda _: None,
) -> list[CaseBench]:
    """Measure the sides of cases at one shape; a side that disagrees with fp64 is not timed.

    Args:
        device: device to run on.
        shape: rows, hidden size and vocabulary.
        dtype: of hidden states, head and logits.
        cases: from `CASES`; those that do not apply to `dtype` are skipped.
        repeat: timed rounds, after one warm-up round.
        clock: measures on the same device.
        includes: whether a side is measured.
        report: called with a line before each stage.
    """
    benches: list[CaseBench] = []
    for kind, make in PROBLEMS.items():
        selected = [case for case in cases if case.kind == kind and case.applies(dtype)]
        if not selected:
            continue
        problem = make(shape, dtype, device.torch_device)
        entries = {
            case.name: [_entry(side, clock) for side in case.sides(case, problem) if includes(side)]
            for case in selected
        }
        report(f"{kind} results in fp64")
        truth = TRUTHS[kind](problem)
        for case in selected:
            for entry in entries[case.name]:
                report(f"{case.name}, {entry.side.name}, compared with fp64")
                check(device, case, entry.side, entry.bench, truth)
        del truth
        device.empty_cache()
        for case in selected:
            report(case.name)
            benches.append(_time(device, case, entries[case.name], shape, dtype, repeat, clock))
        del problem, entries
        device.empty_cache()
    return benches


def _entry(side: Side, clock: Clock) -> _Entry:
    bench = SideBench(side.name, side.group, "timed", clock.samples(), implementations=side.implementations)
    if side.work is None:
        bench.state, bench.reason = "impossible", side.reason
    return _Entry(side, bench)


def check(device: Device, case: Case, side: Side, bench: SideBench, truth: Truth) -> None:
    """Run a side once and compare it with fp64; mark it impossible or wrong if it fails."""
    if side.work is None:
        return
    try:
        with side.in_force():
            result = side.work()
        bench.errors = truth.errors(result)
    except Exception as error:  # other projects' kernels raise anything; the rest can still be measured
        if device.is_oom(error):
            bench.state, bench.reason = "impossible", "it runs out of memory here"
        elif side.group == "peer":
            bench.state, bench.reason = "impossible", _first_line(error)
        else:
            raise
        device.empty_cache()
        return
    reason = fault(case, side, result, bench.errors)
    if reason:
        bench.state, bench.reason = "wrong", reason


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def _time(
    device: Device, case: Case, entries: list[_Entry], shape: Shape, dtype: torch.dtype, repeat: int, clock: Clock
) -> CaseBench:
    timed = [entry for entry in entries if entry.bench.state == "timed"]
    for number in range(repeat + 1):
        for entry in turns(timed, number):
            assert entry.side.work is not None, "a side without work is not timed"
            with entry.side.in_force():
                if number:
                    clock.measure(entry.bench.samples, entry.side.work)
                else:
                    entry.bench.peak_bytes = device_peak(device, entry.side.work)
    by_name = {entry.bench.name: entry.bench for entry in timed}
    base = next((by_name[name] for name in BASELINES if name in by_name), None)
    for entry in timed:
        entry.bench.ratio = median_ratio(base.samples, entry.bench.samples) if base else None
    return CaseBench(
        name=case.name,
        summary=case.summary,
        flops=case.flops(shape, dtype) if case.flops else None,
        bytes=case.bytes(shape, dtype) if case.bytes else None,
        sides=[entry.bench for entry in entries],
        baseline=base.name if base else "",
    )


def _add_host_peaks(shapes: list[ShapeBench], dtype: torch.dtype, report: Callable[[str], None]) -> str:
    if not can_measure_host():
        return "not measured: this system cannot reset the peak resident set size"
    for shape in shapes:
        report(f"{shape.name}: memory, in a separate process")
        sides = {(case.name, side.name): side for case in shape.cases for side in case.sides if side.state == "timed"}
        for key, peak in host_peaks(shape.shape, dtype, sides).items():
            sides[key].peak_bytes = peak
    return "resident set of a separate process"


def _not_here(device: Device, dtype: torch.dtype, vocab: int) -> list[str]:
    return [
        f"{op.op}={each.name}: {each.reason}"
        for op in survey(device.backend.device_type, dtype, vocab)
        for each in op.verdicts
        if each.state == "impossible"
    ]
