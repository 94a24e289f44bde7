"""Model families against plain transformers: one training step and one rollout of a tiny random model of each.

The trainer's log-probs, loss and gradient (in the layout that auto chooses) and the rollout's greedy tokens and
log-probs are compared with full logits, fp64 autograd and `generate`. The tests do the same and hold it to bounds.

    python benchmarks/families.py --output benchmarks/results/families.md
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / folder) for folder in (".", "backends", "kernels", "tests/support")]

import torch  # noqa: E402  (the paths come first)
import transformers  # noqa: E402
from families import FAMILIES, measure  # noqa: E402


def main() -> int:
    """Measure all families and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="write the table to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    lines = [
        "# Model families against plain transformers",
        "",
        f"{datetime.date.today().isoformat()}; CPU ({platform.machine()}), fp32; torch {torch.__version__}, "
        f"transformers {transformers.__version__}.",
        "Command: `python benchmarks/families.py`. Tiny random models (two layers, hidden 32), weights of norms and",
        "biases random too, windows shorter than the sequences. Largest absolute differences; the gradient's is",
        "relative to the largest entry of the same parameter, against fp64 autograd on full logits.",
        "",
        "| family | attention | layout | log-prob | loss | gradient | decoding | greedy tokens | rollout log-prob |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            d = measure(name, Path(folder))
        lines.append(
            f"| {name} | {d.attention} | {d.layout.name} | {d.logprob:.1e} | {d.loss:.1e} | {d.gradient:.1e} | "
            f"{'lean step' if d.decode == 'lean' else 'own forward'} | {'same' if d.same_tokens else 'DIFFERENT'} | "
            f"{d.rollout_logprob:.1e} |"
        )
    table = "\n".join(lines) + "\n"
    print(table)
    if args.output:
        Path(args.output).write_text(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
