"""Model families compared with plain transformers: a training step and a rollout of a tiny random model of each.

The trainer's log-probs, entropies, loss and gradient, in each layout that the model supports, and the rollout's greedy
tokens and log-probs are compared with full logits, fp64 autograd and `generate`. The tests compare the same values and
have bounds for the differences.

    python benchmarks/families.py --output benchmarks/results/families

writes families.md and families.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / folder) for folder in (".", "backends", "kernels")]

import torch  # noqa: E402  (the paths come first)
import transformers  # noqa: E402

from hwgrpo.bench.machine import processor  # noqa: E402
from tests.support.models.families import FALLING_BACK, FAMILIES, Differences, measure  # noqa: E402
from tests.support.processes.ancestry import short_head  # noqa: E402

COLUMNS = (
    ("transformers class", lambda d: d.architecture),
    ("attention", lambda d: d.attention),
    ("auto's layout", lambda d: d.layout.name),
    ("layouts compared", lambda d: ", ".join(d.layouts)),
    ("log-prob", lambda d: f"{d.logprob:.1e}"),
    ("entropy", lambda d: f"{d.entropy:.1e}"),
    ("loss", lambda d: f"{d.loss:.1e}"),
    ("gradient", lambda d: f"{d.gradient:.1e}"),
    ("decoding", lambda d: "lean step" if d.decode == "lean" else "own forward"),
    ("greedy tokens", lambda d: "same" if d.same_tokens else "DIFFERENT"),
    ("rollout log-prob", lambda d: f"{d.rollout_logprob:.1e}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all families and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="write the table to this path with .md, all figures with .json")
    parser.add_argument("--smoke", action="store_true", help="only the first family")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    differences: dict[str, Differences] = {}
    for name in list(FAMILIES)[:1] if args.smoke else (*FAMILIES, *FALLING_BACK):
        with tempfile.TemporaryDirectory() as folder:
            differences[name] = measure(name, Path(folder))
    conditions = {
        "commit": short_head(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{processor()}, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    text = _page(differences, conditions)
    print(text)
    if args.output:
        Path(args.output).with_suffix(".md").write_text(text)
        results = {"conditions": conditions, "families": {name: _figures(d) for name, d in differences.items()}}
        Path(args.output).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _page(differences: dict[str, Differences], conditions: dict[str, Any]) -> str:
    lines = [
        "# Model families compared with plain transformers",
        "",
        f"{conditions['date']}; {conditions['machine']}, one thread, fp32; torch {conditions['torch']}, transformers "
        f"{conditions['transformers']}, Python {conditions['python']}; commit {conditions['commit']}.",
        "",
        "Command: `python benchmarks/families.py --output benchmarks/results/families`. Tiny random models (two",
        "or three layers, hidden 32), weights of norms and biases random too, windows shorter than the sequences.",
        "Largest absolute differences over all layouts compared, log-probs and entropies at temperature 0.8; the",
        "gradient's is relative to the magnitude of the summands of the same parameter's gradient (a bias whose",
        "summands cancel has almost no gradient, and the error of its summands), against fp64 autograd on full",
        "logits. Greedy tokens and the rollout's log-probs are those of `generate(do_sample=False)` and of a",
        "plain forward over prompt and response.",
        "",
        f"| family | {' | '.join(title for title, _ in COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    lines += [f"| {name} | {' | '.join(show(d) for _, show in COLUMNS)} |" for name, d in differences.items()]
    return "\n".join(lines) + "\n"


def _figures(d: Differences) -> dict[str, Any]:
    return {**vars(d), "layout": d.layout.name}


if __name__ == "__main__":
    raise SystemExit(main())
