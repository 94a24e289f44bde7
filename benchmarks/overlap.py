"""Tokens per second of steps with rollout before training (synchronous) and during training (asynchronous), on a CPU.

    python benchmarks/overlap.py --repeat 3 --output results.json

Every way trains the same randomly initialized Qwen3 by `hwgrpo train`; the ways alternate, with a process per round of
a way. "in turn" is synchronous on one thread; in the asynchronous ways rollout and training have a thread each, as they
would have a device each. "in turn, 2 threads" is synchronous with both cores for each stage. The first two steps of a
process are warm-up: the second is the first one with prefetched responses. Rollout correction (token_truncate) is
on in every way, so that all do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import memory  # makes model, prompts and reward

WAYS: dict[str, tuple[str, ...]] = {
    "in turn": ("trainer.threads=1",),
    "in turn, 2 threads": ("trainer.threads=2",),
    "one step off": ("trainer.threads=1", "rollout.max_staleness=1"),
    "up to 2 steps off": ("trainer.threads=1", "rollout.max_staleness=2"),
}
CORRECTED = ("algorithm.correction.name=token_truncate",)
WARM = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(memory.SIZES), default="36m")
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--steps", type=int, default=8, help="steps of a process, including two for warm-up")
    parser.add_argument("--output", help="write the results as JSON to this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all runs")
    parser.add_argument("--smoke", action="store_true", help="one round of the way one step off, with a tiny model")
    args = parser.parse_args(argv)
    ways = WAYS
    if args.smoke:
        args.size, args.repeat, args.steps = memory.SMOKE, 1, WARM + 1
        ways = {way: WAYS[way] for way in ("one step off",)}
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="hwgrpo-overlap-") as folder:
        memory.make(args.size, folder, "float32")
        for number in range(args.repeat):
            for way, settings in ways.items():
                output = Path(folder, f"{way} {number}".replace(" ", "-"))
                rounds[way].append(measured(Path(folder), output, args.steps, [*settings, *args.overrides]))
    print(table(rounds))
    if args.output:
        Path(args.output).write_text(json.dumps(record(args, rounds), indent=1) + "\n")


def measured(folder: Path, output: Path, steps: int, settings: list[str]) -> dict[str, float]:
    """Train in a separate process; return tokens per second and mean seconds of a step and of generation."""
    from hwgrpo.config.load import to_yaml

    run_settings = [*CORRECTED, f"trainer.max_steps={steps}", f"trainer.output_dir={output}", *settings]
    config = memory.settings(folder, run_settings)
    recipe = output.with_suffix(".yaml")
    recipe.write_text(to_yaml(config))
    subprocess.run(
        [sys.executable, "-m", "hwgrpo", "train", recipe],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(memory.PACKAGES)},
    )
    lines = [json.loads(each) for each in (output / "metrics.jsonl").read_text().splitlines()]
    counted = [each for each in lines if "timing_s/step" in each][WARM:]
    seconds = sum(each["timing_s/step"] for each in counted)
    return {
        "tokens_per_second": sum(each["perf/total_num_tokens"] for each in counted) / seconds,
        "step": seconds / len(counted),
        "gen": sum(each["timing_s/gen"] for each in counted) / len(counted),
    }


def table(rounds: dict[str, list[dict[str, float]]]) -> str:
    """Return medians as Markdown, with the ratio to the first way in the same round."""
    first = next(iter(rounds.values()))
    lines = ["| way | tokens/s | of the first | step s | waits for rollout |", "|---|---|---|---|---|"]
    for way, each in rounds.items():
        ratio = statistics.median(
            a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(each, first, strict=True)
        )
        speed, step, gen = (statistics.median(one[key] for one in each) for key in ("tokens_per_second", "step", "gen"))
        lines.append(f"| {way} | {speed:.0f} | {ratio:.2f} | {step:.2f} | {gen / step:.0%} |")
    return "\n".join(lines)


def record(args: argparse.Namespace, rounds: Any) -> dict[str, Any]:
    """Return the results with the machine and the versions."""
    return {
        **memory.machine(),
        "schema": "hwgrpo.bench.overlap/1",
        "threads": {way: settings[0].partition("=")[2] for way, settings in WAYS.items()},
        "size": args.size,
        "steps": args.steps,
        "overrides": args.overrides,
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
