"""Kernels of a training step on a GPU, counted without one, commit by commit.

Two recipes: a small model with all parameters trained, and a 7B with adapters. With --output, the counts of this commit
are added to those of others in the file, and the table has a column for each: what a change to the code has saved.

    python benchmarks/step_ledger.py --output benchmarks/results/step_ledger.json

Everything is counted or modelled, as by `hwgrpo bench step --ledger`, which prints more of one recipe.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "backends"), str(REPO / "kernels")]

SHAPE = ("trainer.prompts_per_step=32", "rollout.n=8", "rollout.max_response_tokens=512", "rollout.max_sequences=256")
OPTIONS = ("model.gradient_checkpointing=false", "algorithm.kl.coef=0.001")
CASES = {
    "0.5B": ("qwen2_5_0_5b_gsm8k", *SHAPE, *OPTIONS, "data.max_prompt_tokens=9"),
    "7B LoRA": ("qwen2_5_7b_gsm8k", *SHAPE, *OPTIONS, "data.max_prompt_tokens=128"),
}
SMOKE = (
    "tiny_sort",
    "model.path=builtin://tiny?steps=0",
    "trainer.prompts_per_step=2",
    "rollout.n=2",
    "rollout.max_response_tokens=18",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Count the cases at this commit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=tuple(CASES), action="append", help="default: both")
    parser.add_argument("--output", help="JSON file to which the counts are added")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, a few tokens")
    args = parser.parse_args(argv)
    cases = {"tiny": SMOKE} if args.smoke else {name: CASES[name] for name in args.case or CASES}
    output = Path(args.output) if args.output else None
    known = json.loads(output.read_text(encoding="utf-8")) if output and output.exists() else {}
    found = {**known.get(commit(), {}), **{name: count(*case) for name, case in cases.items()}}
    commits = {name: stages for name, stages in known.items() if name != commit()} | {commit(): found}
    print("\n".join(table(commits)))
    if output:
        output.write_text(json.dumps(commits, indent=1) + "\n", encoding="utf-8")
    return 0


def count(recipe: str, *overrides: str) -> dict[str, Any]:
    """Return the stages of a recipe's step, without their classes of kernels."""
    from hwgrpo.cli.main import main as hwgrpo

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ledger.json"
        code = hwgrpo(["bench", "step", "--ledger", "--json", str(file), recipe, *overrides])
        assert code == 0, f"hwgrpo bench step --ledger {recipe} ended with {code}"
        stages = json.loads(file.read_text(encoding="utf-8"))["stages"]
    return {name: {key: value for key, value in stage.items() if key != "classes"} for name, stage in stages.items()}


def commit() -> str:
    """Return the short name of the repository's commit."""
    command = ["git", "-C", str(REPO), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def table(commits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a Markdown table: a row per case and stage of the last commit, or of another; three columns per commit."""
    titles = [f"{name}: {what}" for name in commits for what in ("runs x kernels", "waits", "modelled ms")]
    lines = [f"| case | stage | {' | '.join(titles)} |", "|---" * (2 + len(titles)) + "|"]
    last = list(commits.values())[-1]
    for case in last:
        each = [cases.get(case, {}) for cases in commits.values()]
        for stage in dict.fromkeys(stage for stages in (last[case], *each) for stage in stages):
            cells = [cell for stages in each for cell in _cells(stages.get(stage))]
            lines.append(f"| {case} | {stage} | {' | '.join(cells)} |")
        totals = [cell for stages in each for cell in _totals(stages)]
        lines.append(f"| {case} | **step** | {' | '.join(totals)} |")
    return lines


def _cells(counts: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if counts is None:
        return "", "", ""
    runs = counts["runs"]
    kernels = f"{runs:,} x {counts['kernels'] / max(1, runs):,.0f}"
    return kernels, str(counts["host_waits"]), f"{1e3 * counts['modelled_s']:,.1f}"


def _totals(stages: Mapping[str, Any]) -> tuple[str, str, str]:
    kernels, waits, seconds = (
        sum(counts[key] for counts in stages.values()) for key in ("kernels", "host_waits", "modelled_s")
    )
    return f"{kernels:,}", str(waits), f"{1e3 * seconds:,.1f}"


if __name__ == "__main__":
    sys.exit(main())
