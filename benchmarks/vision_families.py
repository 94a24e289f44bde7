"""Vision-language families compared with plain transformers: images encoded once, layouts and a rollout of each.

The reference is a tiny random model's own forward, which reads pixels and makes positions itself, one sequence at a
time. The tests compare the same values and have bounds for the differences.

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
from tests.support.processes.ancestry import short_head  # noqa: E402

Measured = tuple[ForwardDifferences, RunDifferences]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all families and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="write the tables to this path with .md, all figures with .json")
    parser.add_argument("--smoke", action="store_true", help="only the first family")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    measured: dict[str, Measured] = {}
    for name in list(VISION_FAMILIES)[:1] if args.smoke else VISION_FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            measured[name] = forward_differences(name), run_differences(name, Path(folder))
    conditions = {
        "commit": short_head(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{processor()}, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    text = _page(measured, conditions)
    print(text)
    if args.output:
        Path(args.output).with_suffix(".md").write_text(text)
        results = {
            "conditions": conditions,
            "families": {name: asdict(forward) | asdict(run) for name, (forward, run) in measured.items()},
        }
        Path(args.output).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _page(measured: dict[str, Measured], conditions: dict[str, Any]) -> str:
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
    ]
    return "\n".join(lines) + "\n"


def _reason(error: str) -> str:
    """Return an error's reason without the setting that it begins with, the layout and the remedy."""
    reason = re.sub(r"^model\.layout='\w+'(: \w+ does not support the \w+ layout: its| with a)? ", "", error)
    return reason.removesuffix("; use model.layout=padded")


if __name__ == "__main__":
    raise SystemExit(main())
