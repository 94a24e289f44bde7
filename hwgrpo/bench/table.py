"""A measured step as text."""

from __future__ import annotations

import math
from statistics import median

from hwgrpo.bench.step import LayoutResult, StepResult


def table(result: StepResult) -> str:
    """Return the measurement in lines of at most 100 characters, reasons apart."""
    e = result.environment
    mean = result.response_tokens / (result.prompts * result.samples)
    threads = f"{e['threads']} thread{'s' if e['threads'] > 1 else ''}"
    lines = [
        f"{e['device']} ({e['backend']}), {e['dtype']}, {threads}, torch {e['torch']}",
        f"{e['model']}, {e['parameters']:,} parameters; {result.prompts} prompts x {result.samples} samples, "
        f"{result.prompt_tokens:.1f} + {mean:.1f} tokens on average",
        *result.notes,
        "",
        f"{'stage':<20}{'ms':>10}{'min':>10}{'max':>10}{'tokens/s':>12}",
    ]
    for name, seconds in result.stages.items():
        rate = f"{result.response_tokens / median(seconds):>12,.0f}" if name == "generate" else ""
        lines.append(f"{name:<20}{_times(seconds)}{rate}")
    lines += ["", f"{'update':<20}{'ms':>10}{'min':>10}{'max':>10}{'tokens/s':>12}{'fed':>10}{'speed':>8}{'apart':>10}"]
    padded = next((layout for layout in result.layouts if layout.name == "padded"), None)
    for layout in result.layouts:
        lines.append(_row(layout, padded, result))
    if any(layout.peak_bytes for layout in result.layouts):
        peaks = (
            f"{layout.name} {layout.peak_bytes / 2**20:,.0f} MiB" for layout in result.layouts if layout.peak_bytes
        )
        lines.append(f"peak memory: {', '.join(peaks)}")
    lines += [
        "",
        "tokens/s: response tokens; fed: tokens through the model, padding included; speed: against padded;",
        "apart: gradient of the worst parameter against padded, relative. No sequence has advantage 0, so",
        "all are trained.",
    ]
    if result.step_seconds is not None:
        speed = result.response_tokens / result.step_seconds
        lines.append(f"whole step with {result.auto} (*): {1e3 * result.step_seconds:,.1f} ms, {speed:,.0f} tokens/s")
    return "\n".join(lines)


def _row(layout: LayoutResult, padded: LayoutResult | None, result: StepResult) -> str:
    name = f"{layout.name}{' *' if layout.name == result.auto else ''}"
    if not layout.seconds:
        differs = f" (loss {layout.loss_apart:.1e}, gradient {layout.gradient_apart:.1e} apart)" if layout.wrong else ""
        return f"{name:<20}{'WRONG' if layout.wrong else 'not possible'}: {layout.obstacle}{differs}"
    rate = result.response_tokens / median(layout.seconds)
    speed = median(padded.seconds) / median(layout.seconds) if padded and padded.seconds else math.nan
    return (
        f"{name:<20}{_times(layout.seconds)}{rate:>12,.0f}{layout.fed_tokens:>10,}{speed:>7.2f}x"
        f"{layout.gradient_apart:>10.1e}"
    )


def _times(seconds: list[float]) -> str:
    return "".join(f"{1e3 * value:>10,.1f}" for value in (median(seconds), min(seconds), max(seconds)))
