"""Vision-language families compared with plain transformers, two ranks with one, and resumed runs with others.

The reference is a tiny random model's own forward, which reads pixels and makes positions itself, one sequence at a
time; then updates and runs on one rank. The tests compare the same values and have bounds for the differences.

    python benchmarks/vision_families.py --output benchmarks/results/vision_families

writes vision_families.md and vision_families.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / folder) for folder in (".", "backends", "kernels")]

import torch  # noqa: E402  (the paths come first)
import transformers  # noqa: E402

from hwgrpo.bench.machine import processor  # noqa: E402
from hwgrpo.catalog import LAYOUTS  # noqa: E402
from hwgrpo.models.vision import ONE_AXIS, THREE_AXES, UNSUPPORTED  # noqa: E402
from tests.support.models.vision_differences import (  # noqa: E402
    ForwardDifferences,
    RunDifferences,
    forward_differences,
    run_differences,
)
from tests.support.models.vision_families import VISION_FAMILIES  # noqa: E402
from tests.support.models.vision_ranks import (  # noqa: E402
    CASES,
    REFUSED,
    Case,
    RankDifference,
    rank_differences,
    refusals,
)
from tests.support.models.vision_resume import SAVED, STEPS, ResumeDifference, resume_differences  # noqa: E402
from tests.support.processes.ancestry import short_head  # noqa: E402

LIMIT_S = 3600
"""Seconds for two ranks with all families."""
Measured = tuple[ForwardDifferences, RunDifferences]
OnRanks = dict[str, dict[Case, RankDifference]]
Runs = dict[str, ResumeDifference]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all families and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="write the tables to this path with .md, all figures with .json")
    parser.add_argument("--smoke", action="store_true", help="only the first family, and little of it on ranks")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    names = list(VISION_FAMILIES)[:1] if args.smoke else list(VISION_FAMILIES)
    measured: dict[str, Measured] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            measured[name] = forward_differences(name), run_differences(name, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        cases = dict.fromkeys(names, CASES[:1] if args.smoke else CASES)
        on_ranks = rank_differences(cases, Path(folder), limit_s=LIMIT_S)
    with tempfile.TemporaryDirectory() as folder:
        resumed = resume_differences([] if args.smoke else names, Path(folder), limit_s=LIMIT_S)
    conditions = {
        "commit": short_head(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{processor()}, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    text = _page(measured, on_ranks, resumed, conditions)
    print(text)
    if args.output:
        Path(args.output).with_suffix(".md").write_text(text)
        results = {
            "conditions": conditions,
            "families": {name: asdict(forward) | asdict(run) for name, (forward, run) in measured.items()},
            "two_ranks": {
                name: [case._asdict() | asdict(each) for case, each in cases.items()]
                for name, cases in on_ranks.items()
            },
            "runs": {name: asdict(each) for name, each in resumed.items()},
        }
        Path(args.output).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _page(measured: dict[str, Measured], on_ranks: OnRanks, resumed: Runs, conditions: dict[str, Any]) -> str:
    layouts = sorted(LAYOUTS.names())
    columns = [
        "family",
        "model type",
        "alone",
        "two images",
        "padded",
        "gradient",
        *layouts,
        "auto's layout",
        "rollout",
        "decoded by",
    ]
    lines = [
        "# Vision-language families compared with plain transformers",
        "",
        f"{conditions['date']}; {conditions['machine']}, one thread, fp32; torch {conditions['torch']}, transformers "
        f"{conditions['transformers']}, Python {conditions['python']}; commit {conditions['commit']}.",
        "",
        "Command: `python benchmarks/vision_families.py --output benchmarks/results/vision_families`. Tiny random",
        "models (two layers of text and of the tower, hidden 32 and 16), weights of norms and biases random too. The",
        "reference is the model's own forward over one sequence, which reads pixels and makes positions itself.",
        "",
        "| column | largest difference of |",
        "|---|---|",
        "| alone, two images | logits of one sequence, by images that are encoded first and explicit positions |",
        "| left padding | logits of rows of text, of one and of two images |",
        "| gradient | gradients of all parameters, in fp64, of three responses to images that are encoded once |",
        "| a layout | log-probs of a training step, and gradients, at temperature 0.8; refused: by the start check |",
        "| rollout | log-probs of tokens that the local engine samples at temperature 0.8 |",
        "",
        "Logits and log-probs as a share of the largest among them, gradients of the magnitude of their summands.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for name, (forward, run) in measured.items():
        of_layouts = [
            " / ".join(f"{each:.0e}" for each in run.layouts[layout]) if layout in run.layouts else "refused"
            for layout in layouts
        ]
        cells = [
            name,
            f"`{VISION_FAMILIES[name].config().model_type}`",
            *(f"{each:.0e}" for each in (forward.alone, forward.two_images, forward.padded, forward.gradient)),
            *of_layouts,
            run.layout,
            f"{run.rollout:.0e}",
            {"lean": "lean step"}.get(run.decode, "own forward"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Layouts are refused because:",
        "",
        "| family | layouts | reason |",
        "|---|---|---|",
    ]
    for name, (_, run) in measured.items():
        reasons: dict[str, list[str]] = {}
        for layout, error in sorted(run.refused.items()):
            reasons.setdefault(_reason(error), []).append(layout)
        lines += [f"| {name} | {', '.join(layouts)} | {reason} |" for reason, layouts in reasons.items()]
    lines += [
        "",
        f"Other model types than these {len(THREE_AXES | ONE_AXIS)} that read images are refused when they are loaded,"
        " some for a known reason:",
        "",
        "| model type | reason |",
        "|---|---|",
        *(f"| `{kind}` | {reason} |" for kind, reason in UNSUPPORTED.items()),
        *_ranks_section(on_ranks),
        *_runs_section(resumed),
    ]
    return "\n".join(lines) + "\n"


def _ranks_section(on_ranks: OnRanks) -> list[str]:
    columns = list(dict.fromkeys((case.way, case.trained) for cases in on_ranks.values() for case in cases))
    names = [f"{way}: {trained}" for way, trained in columns]
    lines = [
        "",
        "## Two ranks and one",
        "",
        "One update on prompts with one image, with two images and of text, and another on text alone, by two",
        "processes (gloo) and by one. A column is a strategy, and what of the tower is trained; `adapters` are LoRA's,",
        "of the text model and the tower. The larger difference of two ways to share the prompts: images on both",
        "ranks, and text alone on one. Gradients of the first update / all weights after each, as above.",
        "",
        f"| family | {' | '.join(names)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, cases in on_ranks.items():
        cells = []
        for column in columns:
            found = [each for case, each in cases.items() if case[:2] == column]
            gradient = max(each.gradient for each in found)
            weights = max(max(each.weight, each.after_text) for each in found)
            cells.append(f"{gradient:.0e} / {weights:.0e}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "Refused when a run starts, for every family:", "", "| setting | reason |", "|---|---|"]
    for setting in REFUSED:
        reasons = {refusals(name)[setting].partition("), and ")[2] for name in on_ranks}
        lines.append(f"| `{setting}` | {'; '.join(sorted(reasons))} |")
    return lines


def _runs_section(resumed: Runs) -> list[str]:
    lines = [
        "",
        "## Runs that are resumed",
        "",
        f"GRPO for {STEPS} steps on prompts of text, with one and with two images, all of the tower trained: in one",
        f"go, and broken off after the checkpoint of step {SAVED} and resumed. Compared are metrics, completions,",
        "final weights, and parameters, optimizer states, random states and counters of the last checkpoint. Two ranks",
        "train under fsdp2; the last columns are how far their metrics and final weights are from one rank's.",
        "",
        "| family | one rank, resumed | two ranks, resumed | metrics | weights |",
        "|---|---|---|---|---|",
    ]
    for name, found in resumed.items():
        outcomes = [", ".join(each) or "bit for bit" for each in (found.one_rank, found.two_ranks)]
        lines.append(f"| {name} | {' | '.join(outcomes)} | {found.metrics:.0e} | {found.weights:.0e} |")
    return lines


def _reason(error: str) -> str:
    """Return an error's reason without the setting that it begins with, the layout and the remedy."""
    reason = re.sub(r"^model\.layout='\w+'(: \w+ does not support the \w+ layout: its| with a)? ", "", error)
    return reason.removesuffix("; use model.layout=padded")


if __name__ == "__main__":
    raise SystemExit(main())
