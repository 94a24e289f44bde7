"""A measured step as people read it: colours on a terminal, plain text elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple

from rich.table import Table
from rich.text import Text

from hwgrpo.bench.step_result import LayoutBench, StepBench
from hwgrpo.bench.terminal import fact_grid, machine_line, make_console, number_table, print_part
from hwgrpo.bench.times import Times

STAGES = {
    "gen": "generate",
    "reward": "reward",
    "adv": "advantages",
    "old_log_prob": "old log-probs",
    "ref": "reference log-probs",
    "sync": "weights to rollout",
}
"""Stage -> its label, in the order of a step; the update comes before the last."""
BUSY = 0.9
"""Share of a core below which times depend on other work on the machine."""
MISSING = "-"


def show_step(bench: StepBench, recipe: str) -> None:
    """Print a measurement.

    Args:
        bench: the measurement.
        recipe: as the user named it.
    """
    console = make_console()
    for part in (_heading(bench, recipe), _stage_table(bench), _layout_table(bench), _check_table(bench)):
        print_part(console, part)
        console.print()
    for text in _remarks(bench):
        console.print(text, soft_wrap=not console.is_terminal)
    console.print()
    print_part(console, _legend(bench))


def _heading(bench: StepBench, recipe: str) -> Table:
    machine, model, batch = bench.machine, bench.model, bench.batch
    trained = f"{model['trainable']:,} trained" if model["trainable"] != model["parameters"] else "all trained"
    lines = {
        "recipe": f"{recipe}: {model['path']}",
        "model": f"{model['architecture']}, {model['parameters']:,} parameters, {trained}; {model['dtype']}, "
        f"{model['attention']} attention",
        "batch": f"{batch.prompts} prompts x {batch.samples} samples, mean {batch.prompt_tokens:.1f} + "
        f"{batch.response_tokens / max(batch.prompts * batch.samples, 1):.1f} tokens; "
        f"{batch.trained_tokens:,} of {batch.response_tokens:,} response tokens trained; "
        f"micro-batches of {batch.micro_batch_tokens:,}",
        "machine": machine_line(machine),
        "software": f"hwgrpo {machine['hwgrpo']}, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"python {machine['python']}",
    }
    return fact_grid(lines)


def _stage_table(bench: StepBench) -> Table:
    table = number_table("stage", "median ms", "min", "spread", "share", "tokens/s")
    own = next(layout for layout in bench.layouts if layout.name == bench.chosen)
    rows = {STAGES[name]: times for name, times in bench.stages.items()}
    last = rows.popitem() if "sync" in bench.stages else None
    if own.state == "timed":
        rows[f"update, {own.name}"] = own.times
    rows |= dict([last]) if last else {}
    total = bench.step.median if bench.step else None
    rates = {STAGES["gen"]: bench.batch.response_tokens, f"update, {own.name}": own.trained_tokens}
    for name, times in rows.items():
        share = f"{100 * times.median / total:.0f}%" if total and times.median is not None else MISSING
        table.add_row(name, *_times(times), share, _rate(rates.get(name), times))
    if bench.step is not None:
        table.add_row(
            Text("full step", style="bold"), *_times(bench.step), "", _rate(bench.batch.response_tokens, bench.step)
        )
    return table


def _layout_table(bench: StepBench) -> Table:
    timed = [layout for layout in bench.layouts if layout.state == "timed"]
    flops = any(layout.flops for layout in timed)
    table = number_table("update", "median ms", "min", "spread", "speed", "tokens/s", *(["GFLOP/s"] if flops else []))
    best = max((layout.ratio or 0 for layout in timed), default=0)
    for layout in timed:
        ratio = Text(f"{layout.ratio:.2f}x", style="green" if layout.ratio == best > 1 else "")
        work = layout.per_second(layout.flops)
        table.add_row(
            _name(layout, bench),
            *_times(layout.times),
            ratio,
            _rate(layout.trained_tokens, layout.times),
            *([f"{work / 1e9:,.1f}" if work else MISSING] if flops else []),
        )
    return table


def _check_table(bench: StepBench) -> Table:
    peaks = any(layout.peak_bytes for layout in bench.layouts)
    peak_column = ["peak MiB"] if peaks else []
    table = number_table("layout", "tokens fed", *peak_column, "loss diff", "norm diff", "grad diff")
    allowed = bench.tolerance
    for layout in bench.layouts:
        if layout.apart is None:
            continue
        table.add_row(
            _name(layout, bench),
            f"{layout.fed_tokens:,}" if layout.fed_tokens else MISSING,
            *([f"{layout.peak_bytes / 2**20:,.0f}" if layout.peak_bytes else MISSING] if peaks else []),
            *(
                Text(f"{value:.1e}" if value else "0", style="" if value <= limit else "bold red")
                for value, limit in zip(astuple(layout.apart), astuple(allowed), strict=True)
            ),
        )
    blank = [""] * (2 if peaks else 1)
    limits = (f"{limit:.0e}" for limit in astuple(allowed))
    table.add_row(f"allowed, {bench.model['dtype']}", *blank, *limits, style="dim")
    return table


def _legend(bench: StepBench) -> Text:
    count = len(bench.layouts[0].times.wall_s)
    rounds = f"{count} round{'s' if count > 1 else ''}"
    return Text(
        f"* the recipe's layout. spread: of the middle half of {rounds}. speed: against padded. tokens/s: "
        "response tokens, in updates those trained. GFLOP/s: matrix products of all tokens fed, prompts and padding "
        "too. diff: relative difference from padded rows' first update.",
        style="dim",
    )


def _remarks(bench: StepBench) -> Iterable[Text]:
    for layout in bench.layouts:
        if layout.state == "wrong":
            yield Text(f"WRONG: {layout.name} is not timed: {layout.reason}", style="bold red")
        elif layout.state == "impossible":
            yield Text(f"not possible: {layout.name}: {layout.reason}", style="yellow")
    for note in bench.notes:
        yield Text(f"note: {note}", style="yellow")
    share = bench.share_of_core
    if share is not None and share < BUSY:
        yield Text(
            f"note: other work kept this process off its core for {1 - share:.0%} of the time; "
            "go by the ratios, or by the processor times in --json",
            style="yellow",
        )
    if bench.step is None:
        yield Text(f"no time of a full step: the recipe's layout, {bench.chosen}, is wrong", style="bold red")


def _name(layout: LayoutBench, bench: StepBench) -> str:
    return f"{layout.name} *" if layout.name == bench.chosen else layout.name


def _times(times: Times) -> tuple[str, ...]:
    median = times.median or 0.0
    digits = 2 if median < 0.01 else 1 if median < 1 else 0
    values = (times.median, times.minimum, times.spread)
    return tuple(MISSING if value is None else f"{1e3 * value:,.{digits}f}" for value in values)


def _rate(count: int | None, times: Times) -> str:
    return f"{count / times.median:,.0f}" if count and times.median else ""
