"""A step's ledger as people read it, and as JSON. Counts are counted, times are modelled: nothing was run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from hwgrpo.bench.ledger.kernel_costs import Rates
from hwgrpo.bench.ledger.kernel_ledger import Stage, Work
from hwgrpo.bench.terminal import fact_grid, make_console, number_table, print_part
from hwgrpo.config import Config

SCHEMA = "hwgrpo.bench.ledger/1"
LARGEST = 15
"""Classes of kernels that are shown."""


def show_ledger(stages: Mapping[str, Stage], rates: Rates, config: Config, recipe: str) -> None:
    """Print a step's ledger.

    Args:
        stages: in the order of a step.
        rates: of the model.
        config: the settings.
        recipe: as the user named it.
    """
    console = make_console()
    trainer, rollout = config.trainer, config.rollout
    print_part(
        console,
        fact_grid(
            {
                "recipe": f"{recipe}: {config.model.path}",
                "batch": f"{trainer.prompts_per_step} prompts of {config.data.max_prompt_tokens} tokens x {rollout.n} "
                f"samples of {rollout.max_response_tokens}",
                "model": f"{rates.chip}: {rates.bandwidth / 1e12:.2f} TB/s, {rates.flops['bfloat16'] / 1e12:.0f} "
                f"TFLOP/s in bfloat16, at least {1e6 * rates.least_seconds:.0f} us per kernel",
            }
        ),
    )
    console.print()
    table = number_table("stage", "runs", "per run", "kernels", "GB", "TFLOP", "modelled ms", "waits", "copies", gap=1)
    for name, stage in stages.items():
        table.add_row(
            name, f"{stage.runs:,}", f"{per_run(stage):,.0f}", *_work(stage.total), str(stage.waits), str(stage.uploads)
        )
    total = Work()
    for stage in stages.values():
        total.add(stage.total)
    waits, copies = (sum(getattr(stage, name) for stage in stages.values()) for name in ("waits", "uploads"))
    table.add_row(Text("step", style="bold"), "", "", *_work(total), str(waits), str(copies))
    print_part(console, table)
    console.print()
    largest = number_table("largest classes", "stage", "kernels", "GB", "TFLOP", "modelled ms")
    classes = [(name, stage, work) for stage, each in stages.items() for name, work in each.classes.items()]
    for name, stage, work in sorted(classes, key=lambda row: -row[2].seconds)[:LARGEST]:
        largest.add_row(name, stage, *_work(work))
    print_part(console, largest)
    console.print()
    legend = (
        "Kernels, GB, TFLOP, waits (the host reads the device) and copies (host to device) are counted, of operations "
        "that did not run. A kernel's modelled time is the largest of its bytes and FLOPs over the rates above and the "
        "least time; kernels that run at once, caches and idle time between stages are not modelled."
    )
    print_part(console, Text(legend, style="dim"))


def ledger_json(stages: Mapping[str, Stage], rates: Rates) -> dict[str, Any]:
    """Return a step's ledger as a JSON document; keys of a schema version do not change."""
    return {
        "schema": SCHEMA,
        "rates": {
            "chip": rates.chip,
            "bandwidth": rates.bandwidth,
            "flops": dict(rates.flops),
            "least_s": rates.least_seconds,
        },
        "stages": {
            name: {
                "runs": stage.runs,
                **_counts(stage.total),
                "host_waits": stage.waits,
                "uploads": stage.uploads,
                "classes": {key: _counts(work) for key, work in stage.classes.items()},
            }
            for name, stage in stages.items()
        },
    }


def per_run(stage: Stage) -> float:
    """Return the kernels of a stage per run."""
    return stage.total.kernels / max(1, stage.runs)


def _work(work: Work) -> tuple[str, ...]:
    return (
        f"{work.kernels:,}",
        f"{work.bytes / 1e9:,.1f}",
        f"{work.flops / 1e12:,.1f}",
        f"{1e3 * work.seconds:,.1f}",
    )


def _counts(work: Work) -> dict[str, Any]:
    return {"kernels": work.kernels, "bytes": work.bytes, "flops": work.flops, "modelled_s": work.seconds}
