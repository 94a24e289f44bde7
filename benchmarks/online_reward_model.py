"""Calls of the verifier until a policy has learned: a reward model trained on 1 response in 8, against plain GRPO.

    python benchmarks/online_reward_model.py

The tiny model of `tiny_sort` learns to sort digits, 64 prompts of 8 samples a step, constant learning rate, no KL term.
Plain GRPO verifies every response. The online reward model starts from the policy's own start with a new head; all
responses of the first step are verified, then 1 of each 8. A third way verifies every response of 8 prompts a step, so
as many as the second. The accuracy is that of sampled responses to held-out prompts; calls for it are not counted.
Nothing is timed: other work on the machine does no harm.
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

RULE = "reward.functions=[exact_match]"
ONLINE = (
    "reward.functions=[{name: online_reward_model, kwargs: "
    "{verifier: exact_match, warmup_steps: 1, lr: 1.0e-3, epochs: 4, history: 4.0}}]"
)
WAYS: dict[str, tuple[list[str], int]] = {
    "every response verified": ([RULE], 512),
    "online reward model, 1 response in 8 verified": ([ONLINE], 64),
    "every response verified, 8 prompts a step": ([RULE, "trainer.prompts_per_step=8"], 64),
}
"""Way -> its settings, and calls of the verifier in a step after the first."""
SMALLER = [
    "model.path=builtin://tiny?task=sort&hidden=32&layers=1&steps=1",
    "trainer.prompts_per_step=2",
    "data.validation_max_rows=4",
]
TARGETS = (0.8, 0.9)
"""Accuracies to reach."""
STEPS = {512: 50, 64: 120}
"""Steps of a run, by the calls of a step."""
EVERY = 2
"""Steps between measurements of the accuracy."""


def main(argv: Sequence[str] | None = None) -> None:
    """Train every way with every seed, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="two steps of one way by a smaller model")
    args = parser.parse_args(argv)
    seeds, ways = (1, list(WAYS)[1:2]) if args.smoke else (args.seeds, list(WAYS))
    found: dict[str, list[dict[float, float]]] = {way: [] for way in ways}
    accuracies: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for way in ways:
                print(f"training: {way}, seed {seed}", file=sys.stderr, flush=True)
                reached, ranked = train(Path(folder) / f"{seed}-{ways.index(way)}", way, seed, smoke=args.smoke)
                found[way].append(reached)
                accuracies += ranked
    print(table(found))
    if accuracies:
        print(
            "\nRanking accuracy of the reward model on outcomes that it was not trained on yet, median of all "
            f"trainings: {median(accuracies):.2f}"
        )


def train(folder: Path, way: str, seed: int, *, smoke: bool) -> tuple[dict[float, float], list[float]]:
    """Return the verifier's calls until each accuracy was measured, and the ranking accuracies of all trainings."""
    folder.mkdir()
    own, per_step = WAYS[way]
    settings = [
        f"trainer.output_dir={folder / 'run'}",
        f"trainer.seed={seed}",
        f"trainer.max_steps={EVERY if smoke else STEPS[per_step]}",
        f"trainer.validate_every={EVERY}",
        "data.validation=task://sort",
        "trainer.save_every=0",
        "trainer.save_final_model=false",
        "optim.schedule=constant",
        "algorithm.kl.coef=0",
        "observe.loggers=[jsonl]",
        "observe.progress=none",
        *own,
        *(SMALLER if smoke else []),
    ]
    subprocess.run([sys.executable, "-m", "hwgrpo", "train", "tiny_sort", *settings], check=True)
    calls, reached, ranked = 0.0, {}, []
    for line in map(json.loads, (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if "perf/throughput" in line:
            calls += line.get("reward/online_reward_model/verifier_calls", per_step)
        if "reward/online_reward_model/ranking_accuracy" in line:
            ranked.append(line["reward/online_reward_model/ranking_accuracy"])
        for name, value in line.items():
            if name.startswith("val-core/") and name.endswith("/mean@4"):
                reached |= {target: calls for target in TARGETS if value >= target and target not in reached}
    return reached, ranked


def table(found: dict[str, list[dict[float, float]]]) -> str:
    """Return the calls to each accuracy per seed, and the median's ratio to the first way's, as Markdown."""
    lines = [f"| | {' | '.join(f'calls until {target:g}' for target in TARGETS)} |", "|---" * (1 + len(TARGETS)) + "|"]
    first: dict[float, float] = {}
    for way, seeds in found.items():
        cells = []
        for target in TARGETS:
            calls = [reached.get(target, float("inf")) for reached in seeds]
            middle = median(calls)
            base = first.setdefault(target, middle)
            ratio = f" ({middle / base:.2f})" if base not in (0, float("inf")) else ""
            cells.append(f"{middle:,.0f}{ratio}: {', '.join(f'{each:,.0f}' for each in calls)}")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
