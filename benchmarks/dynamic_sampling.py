"""Response tokens sampled until a model has learned, where many prompts carry no signal.

    python benchmarks/dynamic_sampling.py
    python benchmarks/dynamic_sampling.py --hopeless 15 --lr 1e-3 --tokens 160000 --seeds 3

The training prompts are 64 that ask to sort digits, and as many or more of the same form to which no response is right.
The accuracy is that of sampled responses to the former. Every way trains the tiny model from one start with the same
learning rate; tokens of groups that are filtered out count. Nothing is timed: other work on the machine does no harm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hwgrpo.data.tasks import parse_task

FILTER = "algorithm.filter_groups.enable=true"
WAYS: dict[str, list[str]] = {
    "none": [],
    "filter_groups": [FILTER],
    "filter_groups, hard prompts set aside": [FILTER, "data.difficulty.hard_threshold=0"],
    "hard prompts set aside": ["data.difficulty.hard_threshold=0"],
    "filter_groups of one round, replay": [
        FILTER,
        "algorithm.filter_groups.max_rounds=1",
        "algorithm.filter_groups.replay_groups=32",
        "algorithm.correction.name=token_truncate",
    ],
}
SMALLER = [
    "model.path=builtin://tiny?task=sort&hidden=32&layers=1&steps=1",
    "trainer.prompts_per_step=2",
    "data.validation_max_rows=4",
]
TARGETS = (0.8, 0.9, 0.95, 0.98)
"""Accuracies to reach."""
EVERY = 2
"""Steps between measurements of the accuracy."""


def main(argv: Sequence[str] | None = None) -> None:
    """Train every way with every seed, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=80_000, help="tokens after which a run ends (default 80000)")
    parser.add_argument(
        "--hopeless", type=int, default=1, help="prompts without a right response per other (default 1)"
    )
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--smoke", action="store_true", help="two steps of one way by a smaller model")
    args = parser.parse_args(argv)
    ways = list(WAYS)
    if args.smoke:
        args.seeds, args.tokens, ways = 1, 1, ["filter_groups"]
    curves: dict[str, list[list[dict[str, float]]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for way in ways:
                print(f"training: {way}, seed {seed}", file=sys.stderr, flush=True)
                curves[way].append(train(Path(folder) / f"{seed}-{ways.index(way)}", way, seed, args))
    print(table(curves, args.tokens))


def write_data(folder: Path, hopeless: int, prompts: int = 64) -> tuple[Path, Path]:
    """Write the training prompts, and those of them that can be solved; return the files."""
    rows: list[dict[str, Any]] = [
        dict(row) for row in parse_task("task://sort").splits["train"][: (1 + hopeless) * prompts]
    ]
    solvable, others = rows[:prompts], [{**row, "ground_truth": "none"} for row in rows[prompts:]]
    files = folder / "train.jsonl", folder / "solvable.jsonl"
    for file, content in zip(files, (solvable + others, solvable), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return files


def train(folder: Path, way: str, seed: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """Return the sampled tokens and the accuracy after every `EVERY` steps, until a number of tokens."""
    folder.mkdir()
    training, solvable = write_data(folder, args.hopeless)
    # a step without a filter samples 16 * 8 responses of about 5 tokens, one with it about twice as many
    settings = [
        f"data.train={training}",
        f"data.validation={solvable}",
        f"trainer.output_dir={folder / 'run'}",
        f"trainer.seed={seed}",
        f"trainer.max_steps={max(EVERY, args.tokens // 640)}",
        f"trainer.validate_every={EVERY}",
        "trainer.prompts_per_step=16",
        "trainer.save_every=0",
        "trainer.save_final_model=false",
        f"optim.lr={args.lr}",
        "optim.schedule=constant",
        "algorithm.kl.coef=0",
        "observe.loggers=[jsonl]",
        "observe.progress=none",
    ]
    smaller = SMALLER if args.smoke else []
    subprocess.run([sys.executable, "-m", "hwgrpo", "train", "tiny_sort", *settings, *smaller, *WAYS[way]], check=True)
    curve, sampled, step = [], 0.0, 0.0
    for line in map(json.loads, (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if "perf/response_tokens" in line:
            sampled += line.get("filter_groups/response_tokens", line["perf/response_tokens"])
            step = line["step"]
        for name, value in line.items():
            if name.startswith("val-core/") and name.endswith("/mean@4") and (sampled <= args.tokens or not curve):
                curve.append({"step": step, "tokens": sampled, "accuracy": value})
    return curve


def first(curve: list[dict[str, float]], target: float, column: str) -> float | None:
    """Return the step, or the tokens, at which an accuracy was first measured; None if it was not."""
    return next((point[column] for point in curve if point["accuracy"] >= target), None)


def table(curves: dict[str, list[list[dict[str, float]]]], tokens: int) -> str:
    """Return the median over seeds of tokens and steps to each accuracy, as Markdown."""
    heads = [f"{target:g}: tokens (of none), steps" for target in TARGETS]
    lines = [f"| filter | {' | '.join(heads)} |", "|---" * (1 + len(TARGETS)) + "|"]
    baseline: dict[float, float | None] = {}
    for way, seeds in curves.items():
        cells = []
        for target in TARGETS:
            reached = [(first(curve, target, "tokens"), first(curve, target, "step")) for curve in seeds]
            hits = [(t, s) for t, s in reached if t is not None and s is not None]
            if 2 * len(hits) <= len(seeds):
                baseline.setdefault(target, None)
                cells.append(f"{len(hits)} of {len(seeds)} seeds within {tokens:,}")
                continue
            # seeds that did not reach it count as later than all others
            spent, steps = (
                median([*(hit[i] for hit in hits), *[float("inf")] * (len(seeds) - len(hits))]) for i in (0, 1)
            )
            none = baseline.setdefault(target, spent)
            ratio = f" ({spent / none:.2f})" if none else ""
            cells.append(f"{spent:,.0f}{ratio}, {steps:g}")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
