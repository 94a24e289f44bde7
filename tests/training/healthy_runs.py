"""Healthy runs of the recipe tiny_sort, whose gaps the guard must leave alone.

`python -m tests.training.healthy_runs` runs 20 seeds of each variant, about five minutes on one core, and writes
the gap of each step to healthy_gaps.jsonl. It says how many notes of the guard there were.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hwgrpo_backends.cpu import BACKEND

from hwgrpo.algorithms.gap_guard import THRESHOLDS
from hwgrpo.config import load_config
from hwgrpo.observe.observer import Observer
from hwgrpo.training.loop import train
from hwgrpo.training.setup import build_run
from tests.support.runs import runs

RECIPE = Path(__file__).parents[2] / "configs" / "tiny_sort.yaml"
FILE = Path(__file__).parent / "healthy_gaps.jsonl"
SEEDS = range(20)
VARIANTS: dict[str, tuple[str, ...]] = {
    "recipe": (),
    "bf16 engine": ("rollout.dtype=bfloat16",),
    "one step off": ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate"),
}
FIT = ("rollout_corr/k3_kl", "rollout_corr/log_ratio_slope", "rollout_corr/log_ratio_r2")
NAMES = (*(each.metric for each in THRESHOLDS), *FIT)


def run(folder: Path, seed: int, variant: str, steps: int = 30) -> tuple[list[dict[str, Any]], list[str]]:
    """Train with a guard that acts; return the metrics of each step and the guard's notes."""
    words = (
        f"trainer.output_dir={folder}",
        f"trainer.seed={seed}",
        f"trainer.max_steps={steps}",
        "trainer.validate_at_start=false",
        "data.validation_max_rows=8",
        "observe.loggers=[jsonl]",
        "observe.progress=none",
        "rollout.guard=act",
    )
    parts = build_run(load_config(str(RECIPE), [*words, *VARIANTS[variant]]), BACKEND, 0, 1)
    notes: list[str] = []
    plain = Observer.note
    parts.observer.note = lambda text: (notes.append(text), plain(parts.observer, text))[1]
    try:
        train(parts)
    finally:
        parts.close()
    lines = [line for line in runs.metrics(folder) if NAMES[0] in line]
    return lines, [note for note in notes if note.startswith("rollout.guard")]


def record() -> None:
    """Run all seeds and variants, and write their gaps."""
    stated, measured = 0, 0
    with FILE.open("w") as file:
        for variant in VARIANTS:
            for seed in SEEDS:
                with tempfile.TemporaryDirectory() as folder:
                    lines, notes = run(Path(folder) / "run", seed, variant)
                gaps = {name: [float(f"{line[name]:.4g}") for line in lines] for name in NAMES}
                file.write(json.dumps({"variant": variant, "seed": seed} | gaps) + "\n")
                file.flush()
                stated, measured = stated + len(notes), measured + len(lines)
                worst = {each.metric: max(abs(v - each.equal) for v in gaps[each.metric]) for each in THRESHOLDS}
                largest = ", ".join(f"{name.rpartition('/')[2]} {value:.3g}" for name, value in worst.items())
                print(f"{variant}, seed {seed}: {len(lines)} steps, {len(notes)} notes; largest {largest}", flush=True)
    print(f"{len(VARIANTS) * len(SEEDS)} runs, {measured} measured steps, {stated} notes of the guard")


if __name__ == "__main__":
    record()
