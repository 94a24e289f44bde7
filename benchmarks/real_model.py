"""GRPO on a published chat model: the arithmetic recipe with several seeds, a control, and other dtypes and trainings.

    python scripts/fetch_smollm2.py FOLDER
    python benchmarks/real_model.py --model FOLDER --output benchmarks/results/real_model.json

Every way trains `smollm2_135m_arithmetic`, one after another, with a process of one thread for each of two cores:
threads of one process would wait for each other after every operation. The control draws the rewards of a step's
responses in another order (`reward.shuffle`), so that they say nothing of the answers. The table has accuracies on
held-out questions: greedy, of one sample, and the share of samples that are a number and nothing else. A picture of the
greedy accuracy is written beside the results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

RECIPE = "smollm2_135m_arithmetic"
BF16 = "model.dtype=bfloat16"
WAYS: dict[str, list[str]] = {
    **{f"LoRA, bf16, seed {seed}": [BF16, f"trainer.seed={seed}"] for seed in (1, 2, 3)},
    "LoRA, bf16, rewards shuffled": [BF16, "trainer.seed=1", "reward.shuffle=true"],
    "LoRA, fp32, seed 1": ["model.dtype=float32", "trainer.seed=1"],
    "all parameters, bf16, seed 1": [BF16, "trainer.seed=1", "model.lora.rank=0", "optim.lr=1.0e-5"],
}
SMOKE = [
    "model.path=builtin://tiny?task=add&hidden=32&layers=1&steps=1",
    *("data.train=task://add?max=9", "data.validation=task://add?max=9", "data.validation_max_rows=8"),
    *("data.chat=never", "data.instruction=null", "data.few_shot=[]"),
    *("trainer.prompts_per_step=4", "trainer.max_steps=2", "trainer.validate_every=1"),
    "reward.functions=[exact_match, {name: regex, weight: 0, kwargs: {pattern: '[0-9]+', mode: fullmatch}}]",
]
COLORS = ("#1f5fbf", "#3f8fdf", "#7fb6ef", "#888888", "#c2571a", "#3d8b37", "#8e44ad", "#b8860b", "#16a085", "#d16ba5")
"""Of the ways, in the picture."""
TIMES = ("step_s", "generate_s", "update_s")
COLUMNS = {
    "reward": "reward",
    "entropy": "entropy",
    "response_length": "response_length/mean",
    **dict(zip(TIMES, ("timing_s/step", "timing_s/gen", "timing_s/update_actor"), strict=True)),
}
"""Column of the curve -> metric."""
VALIDATION = {
    "greedy": "val-core/.*/reward/greedy$",
    "sampled": "val-core/.*/reward/mean@",
    "number_alone": "val-aux/.*/rewards/regex/mean$",
}
"""Column of the validations -> pattern of the metric."""
Curve = list[dict[str, float]]


def main(argv: Sequence[str] | None = None) -> None:
    """Train, write the curves and their picture, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), metavar="WAY", help=f"of: {'; '.join(WAYS)}")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread that share a step's prompts")
    parser.add_argument("--output", help="JSON file of the results; those of other ways that it holds are kept")
    parser.add_argument("--smoke", action="store_true", help="two steps of a tiny model")
    parser.add_argument("overrides", nargs="*", help="further settings, as of hwgrpo train")
    args = parser.parse_args(argv)
    if not args.smoke and (args.model is None or args.output is None):
        parser.error("--model and --output are required: name the model's folder and the JSON file of the results")
    more = [*(SMOKE if args.smoke else [f"model.path={args.model}"]), *args.overrides]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(args.output or f"{folder}/real_model.json")
        results: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
        for way in args.ways or (["LoRA, fp32, seed 1"] if args.smoke else list(WAYS)):
            print(f"training: {way}", file=sys.stderr, flush=True)
            results[way] = train(Path(folder) / str(len(results)), [*WAYS[way], *more], args.ranks)
            results = {name: results[name] for name in WAYS if name in results}
            output.write_text(json.dumps(results, indent=1) + "\n")  # keeps the finished ways if a later one fails
            output.with_suffix(".svg").write_text(picture(results, WAYS))
    print(table(results))


def train(output: Path, overrides: Sequence[str], ranks: int) -> dict[str, Any]:
    """Return `read_run` of a run, and the peak memory of its largest process."""
    settings = [
        *("trainer.threads=1", f"trainer.output_dir={output}", "trainer.save_every=0", "backend.name=cpu"),
        *("observe.loggers=[jsonl]", "observe.progress=none"),
    ]
    launch = [] if ranks == 1 else ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command = [sys.executable, "-m", *launch, "hwgrpo", "train", RECIPE, *settings, *overrides]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the run ended with exit code {os.waitstatus_to_exitcode(status)}: {' '.join(command)}")
    return read_run(output) | {"peak_mib": usage.ru_maxrss / 1024}


def read_run(output: Path, further: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the training curve, the validations, the time and the warnings of a run.

    Args:
        output: folder of the run.
        further: further columns of the curve -> metrics.
    """
    columns = {**COLUMNS, **(further or {})}
    curve: Curve = []
    validations: Curve = []
    for line in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()):
        if "timing_s/step" in line:
            curve.append({name: line[metric] for name, metric in columns.items()})
        if found := {
            name: value for name, end in VALIDATION.items() for key, value in line.items() if re.match(end, key)
        }:
            validations.append({"step": line["step"], **found})
    summary = json.loads((output / "summary.json").read_text())
    return {
        "curve": curve,
        "validations": validations,
        "minutes": summary["wall_s"] / 60,
        "warnings": [f"{each['name']} at step {each['step']}" for each in summary["warnings"]],
    }


def table(results: Mapping[str, Any]) -> str:
    """Return accuracies before and after, times and memory of each way, as Markdown."""
    lines = [
        "| way | greedy before, after | one sample | a number alone | steps, minutes | s/step: generate, update "
        "| peak MiB | warnings |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way, result in results.items():
        ends = [result["validations"][0], result["validations"][-1]]
        greedy, sampled, formed = (
            ", ".join(f"{end[name]:.3f}" for end in ends if name in end) or "-" for name in VALIDATION
        )
        step, generate, update = (median(point[name] for point in result["curve"]) for name in TIMES)
        warnings = ", ".join(result["warnings"]) or "-"
        peak = f"{result['peak_mib']:,.0f}" if "peak_mib" in result else "-"
        lines.append(
            f"| {way} | {greedy} | {sampled} | {formed} | {len(result['curve'])}, {result['minutes']:.1f} | "
            f"{step:.1f}: {generate:.1f}, {update:.1f} | {peak} | {warnings} |"
        )
    return "\n".join(lines)


def picture(results: Mapping[str, Any], ways: Sequence[str] | Mapping[str, Any]) -> str:
    """Return an SVG of greedy accuracy over steps of each way.

    Args:
        results: way -> `read_run`.
        ways: all ways, by whose order they are coloured.
    """
    longest = max(result["validations"][-1]["step"] for result in results.values())
    left, top, width, height = 50, 20, 640, 300

    def place(step: float, accuracy: float) -> str:
        return f"{left + width * step / longest:.1f},{top + height * (1 - accuracy):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {top + height + 60}" font-family="sans-serif" '
        'font-size="13"><rect width="100%" height="100%" fill="#ffffff"/>'
    ]
    for tick in range(0, 101, 20):
        _, y = place(0, tick / 100).split(",")
        parts.append(f'<path d="M{left} {y}h{width}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{tick} %</text>')
    for step in range(0, longest + 1, max(1, longest // 5)):
        x, y = place(step, 0).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 20:.1f}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{top + height + 45}" text-anchor="middle">step</text>')
    for number, (way, result) in enumerate(results.items()):
        color = COLORS[list(ways).index(way) % len(COLORS)]
        points = [place(point["step"], point["greedy"]) for point in result["validations"]]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in (p.split(",") for p in points)]
        y = top + 14 + 22 * number
        parts.append(f'<path d="M{left + width + 20} {y}h22" stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{left + width + 50}" y="{y + 4}">{way}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
