"""Measured kernels as people read them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hwgrpo.bench.kernels.kernel_result import CaseBench, KernelBench, ShapeBench, SideBench
from hwgrpo.bench.terminal import fact_grid, machine_line, make_console, number_table, print_part

MISSING = "-"
ABSENT = "not installed: "
CLOCKS = {
    "device": "events on the device",
    "processor": "processor time of this process",
    "wall": "time on the clock",
}


def show_kernels(bench: KernelBench) -> None:
    """Print a measurement."""
    console = make_console()
    print_part(console, _heading(bench))
    for shape in bench.shapes:
        console.print()
        _show_shape(console, bench, shape)
    console.print()
    for text in _remarks(bench):
        console.print(text, soft_wrap=not console.is_terminal)
    console.print()
    print_part(console, _legend(bench))


def _heading(bench: KernelBench) -> Table:
    machine, ceiling = bench.machine, bench.ceiling
    peers = ", ".join(f"{name} {version}" for name, version in bench.peers.items() if version)
    lines = {
        "machine": machine_line(machine),
        "software": f"hwgrpo {machine['hwgrpo']}, torch {machine['torch']}, python {machine['python']}"
        + (f"; {peers}" if peers else ""),
        "ceilings": f"GEMM of {ceiling.gemm_side}^3 in {bench.dtype}: {rate(ceiling.flops_per_s, 'F')}; "
        f"copy: {rate(ceiling.bytes_per_s, 'B')}",
        "clock": f"{CLOCKS[bench.clock]}, {bench.repeat} round{'s' if bench.repeat > 1 else ''}",
    }
    return fact_grid(lines)


def _show_shape(console: Console, bench: KernelBench, shape: ShapeBench) -> None:
    n, h, v = shape.shape
    title = f"{shape.name}: N={n:,} H={h:,} V={v:,}, {bench.dtype}; its GEMM alone {rate(shape.gemm_rate, 'F')}"
    console.print(Text(title, style="bold"))
    memory = any(side.peak_bytes is not None for case in shape.cases for side in case.sides)
    columns = ["ms", "spread", "speed", "rate", "ceiling", *(["MiB"] if memory else []), "error", "grad"]
    table = number_table("", *columns, least_width=19, gap=1)
    for case in shape.cases:
        table.add_row(Text(case.name, style="bold"))
        fastest = max((side.ratio or 0 for side in case.sides), default=0)
        for side in case.sides:
            if side.state == "timed":
                table.add_row(*_side(bench, case, side, fastest, memory))
    print_part(console, table)


def _side(bench: KernelBench, case: CaseBench, side: SideBench, fastest: float, memory: bool) -> list[str | Text]:
    samples = side.samples.to_json()
    forward, backward = side.worst
    share = case.share(side, bench.ceiling)
    ratio = f"{side.ratio:.2f}x" if side.ratio else MISSING
    return [
        Text(f"  {side.name}", style="" if side.group == "ours" else "dim"),
        milliseconds(samples["median_s"]),
        milliseconds(samples["spread_s"]),
        Text(ratio, style="green" if side.ratio == fastest > 1 else ""),
        rate(case.rate(side), "F" if case.flops is not None else "B"),
        f"{share:.0%}" if share else MISSING,
        *([f"{side.peak_bytes / 2**20:,.0f}" if side.peak_bytes is not None else MISSING] if memory else []),
        _error(forward),
        _error(backward),
    ]


def _remarks(bench: KernelBench) -> Iterable[Text]:
    seen: dict[tuple[str, str, str], list[str]] = {}
    for shape in bench.shapes:
        for case in shape.cases:
            for side in case.sides:
                if side.state == "wrong":
                    yield Text(
                        f"WRONG: {side.name} is not timed in {case.name} at {shape.name}: {side.reason}",
                        style="bold red",
                    )
                elif side.state == "impossible":
                    seen.setdefault((side.name, side.reason, side.group), []).append(case.name)
    absent = [f"{name} ({reason.removeprefix(ABSENT)})" for name, reason, _ in seen if reason.startswith(ABSENT)]
    if absent:
        yield Text(f"{ABSENT}{', '.join(absent)}", style="yellow")
    for (name, reason, _), cases in seen.items():
        if not reason.startswith(ABSENT):
            where = "" if len(set(cases)) > 1 else f" ({cases[0]})"
            yield Text(f"{name}: {reason}{where}", style="yellow")
    for line in bench.not_here:
        yield Text(f"not here: {line}", style="yellow")
    if bench.peak.startswith("not measured"):
        yield Text(f"memory {bench.peak}", style="yellow")


def _legend(bench: KernelBench) -> Text:
    memory = "" if bench.peak.startswith("not measured") else f" MiB: beyond inputs and results ({bench.peak})."
    return Text(
        "ms: median of rounds in which all sides of a case take turns; spread: of their middle half. speed: against "
        "eager, else the definition. rate: matrix products that are needed at least, or bytes that must move. ceiling: "
        f"share of the GEMM's or the copy's rate.{memory} error: from fp64 on the same inputs, of log-probs and "
        "entropies |a-b|/(1+|b|), of gradients relative.",
        style="dim",
    )


def milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds with three digits or so."""
    if seconds is None:
        return MISSING
    digits = 3 if seconds < 1e-3 else 2 if seconds < 1e-2 else 1 if seconds < 1 else 0
    return f"{1e3 * seconds:,.{digits}f}"


def rate(per_second: float | None, unit: str) -> str:
    """Return a rate per second with its prefix: 5.1 TF/s, 3.4 GB/s."""
    if per_second is None:
        return MISSING
    power, prefix = (1e12, "T") if per_second >= 1e12 else (1e9, "G")
    return f"{per_second / power:.1f} {prefix}{unit}/s"


def _error(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0e}" if value else "0"
