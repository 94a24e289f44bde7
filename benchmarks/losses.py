"""What each policy loss costs in an update, as a multiple of ppo_clip at the same scope.

Two randomly initialized models; a step is two updates, off policy, of responses to eight prompts. Every update with a
loss has one with ppo_clip directly beside it, of the same batch and from the same weights, and the table has the
median over the rounds of their ratio. The row of ppo_clip is it beside itself: the noise of the measurement.

    python benchmarks/losses.py --output results.json

The exit code is 1 if the processor time of a loss is above its limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "backends"), str(REPO / "kernels")]

MODELS = {
    "tiny": "builtin://tiny?steps=0",
    "6.5m": "builtin://tiny?steps=0&hidden=256&head=32&layers=11",
}
ROUNDS = {"tiny": 20, "6.5m": 6}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the models; return 1 if a loss is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), action="append", help="default: both")
    parser.add_argument("--losses", metavar="NAMES", help="losses and masks to measure, e.g. gspo,kl_cov; default: all")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, help="rounds; default: 20 of the tiny model, 6 of the other")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", help="write all rounds as JSON to this file")
    parser.add_argument("--smoke", action="store_true", help="one round of three losses, with the tiny model")
    args = parser.parse_args(argv)
    if args.smoke:
        args.model, args.losses, args.repeat = ["tiny"], "ppo_clip,gspo,kl_cov", 1
        args.samples, args.response_tokens = 2, 4
    results = {name: measure(name, args) for name in args.model or MODELS}
    from hwgrpo.bench.loss_comparison import table

    for number, (name, (parameters, benches)) in enumerate(results.items()):
        head, rule, *rows = table(benches)
        if not number:
            print(f"| model {head}\n|---{rule}")
        print("\n".join(f"| {name}, {parameters / 1e6:.2f}M {row}" for row in rows))
    if args.output:
        document = [
            {"model": name, "parameters": parameters, "losses": [each.to_json() for each in benches]}
            for name, (parameters, benches) in results.items()
        ]
        Path(args.output).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    above = [each for _, benches in results.values() for each in benches if each.ratios[1] > each.limit]
    return int(bool(above) and not args.smoke)


def measure(model: str, args: argparse.Namespace) -> tuple[int, list[Any]]:
    """Return the number of a model's parameters, and its `LossBench`es."""
    from hwgrpo_backends import registry
    from hwgrpo_backends.device import Device

    from hwgrpo.bench.loss_comparison import known_names, measure_losses
    from hwgrpo.config import load_config
    from hwgrpo.training.setup import build_run

    with tempfile.TemporaryDirectory(prefix="hwgrpo-losses-") as folder:
        settings = [
            f"model.path={MODELS[model]}",
            "data.train=task://sort",
            "reward.functions=[exact_match]",
            f"rollout.n={args.samples}",
            f"rollout.max_response_tokens={args.response_tokens}",
            "trainer.prompts_per_step=8",
            "trainer.prompts_per_update=4",
            "trainer.max_steps=1",
            f"trainer.threads={args.threads}",
            f"trainer.output_dir={folder}/run",
            "observe.loggers=[jsonl]",
            "observe.progress=none",
            "observe.completions_per_step=0",
        ]
        backend = registry.get("cpu")
        run = build_run(load_config(None, settings), backend, 0, 1)
        names = args.losses.split(",") if args.losses else known_names()
        try:
            benches = measure_losses(run, Device(backend), names, args.repeat or ROUNDS[model])
            return sum(each.numel() for each in run.update.policy.parameters()), benches
        finally:
            run.close()
            run.strategy.close()


if __name__ == "__main__":
    raise SystemExit(main())
