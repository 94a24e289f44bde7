"""Modelled times of an update's layers by layout on GPUs, counted without one: where `grouped` and `packed` break even.

Attention is by lengths. Responses have 512 tokens, 8 to a prompt; lengths are equal, so that padded rows pad nothing.
`auto` chooses by `cheaper_layout`, whose constant is compared with the last column but one.

    python benchmarks/layout_times.py --output benchmarks/results/layout_times.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "backends"), str(REPO / "kernels")]

N, RESPONSE = 8, 512
MODELS = {"0.5B": "qwen2_5_0_5b_gsm8k", "7B LoRA": "qwen2_5_7b_gsm8k"}
CHIPS = ("H100 SXM", "MI300X")
PROMPTS = (9, 64, 128, 512)
LAYOUTS = ("grouped", "packed", "padded")
OPTIONS = ("trainer.prompts_per_step=32", "model.gradient_checkpointing=false", "algorithm.kl.coef=0")
SMOKE = ("trainer.prompts_per_step=2", "model.path=builtin://tiny?steps=0", "algorithm.kl.coef=0")


def main(argv: Sequence[str] | None = None) -> int:
    """Count the updates and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="JSON file for the counts")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, a few tokens")
    args = parser.parse_args(argv)
    if args.smoke:
        rows = [compare("tiny", "tiny_sort", CHIPS[0], 4, 8, SMOKE)]
    else:
        rows = [
            compare(name, recipe, chip, prompt, RESPONSE, OPTIONS)
            for name, recipe in MODELS.items()
            for chip in CHIPS
            for prompt in PROMPTS
        ]
    print("\n".join(table(rows)))
    if args.output:
        Path(args.output).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def compare(name: str, recipe: str, chip: str, prompt: int, response: int, options: Sequence[str]) -> dict[str, Any]:
    """Return the modelled seconds of a recipe's update in each layout, without LM head and optimizer.

    Args:
        name: of the model in the table.
        recipe: its recipe.
        chip: the GPU.
        prompt: tokens of each prompt.
        response: tokens of each response.
        options: further settings.
    """
    from hwgrpo.training.policy.layouts import cheaper_layout, saved_share

    lengths = f"data.max_prompt_tokens={prompt}", f"rollout.max_response_tokens={response}", f"rollout.n={N}"
    counted = {each: count(recipe, chip, *options, *lengths, f"model.layout={each}") for each in LAYOUTS}
    hidden = counted["packed"][1]
    seconds = {each: of_layers for each, (of_layers, _) in counted.items()}
    saved = saved_share(prompt, response, N)
    cost = (seconds["grouped"] / seconds["packed"] / (1 - saved) - 1) * hidden
    auto = cheaper_layout(prompt, response, N, hidden)
    return {"model": name, "chip": chip, "prompt": prompt, "saved": saved, **seconds, "merge_cost": cost, "auto": auto}


def count(recipe: str, chip_name: str, *overrides: str) -> tuple[float, int]:
    """Return the modelled seconds of the layers of an update on a chip, and the model's hidden size."""
    from hwgrpo.bench.ledger.kernel_costs import Rates
    from hwgrpo.bench.ledger.kernel_ledger import KernelLedger
    from hwgrpo.bench.ledger.ledger_step import BACKWARD, FORWARD, LedgerStep
    from hwgrpo.cli.chips import closest_chip
    from hwgrpo.config import load_config

    config = load_config(recipe, overrides, data_may_be_missing=True)
    chip, backend = closest_chip(chip_name, config)
    ledger = KernelLedger(Rates.of(chip))
    with ledger.counting(backend) as device:
        step = LedgerStep(config, ledger, device, backend)
        update = step.update()
        step.count_update(update, step.batch())
    return sum(ledger.stages[name].total.seconds for name in (FORWARD, BACKWARD)), update.policy.hidden_size


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a Markdown table."""
    titles = "model", "chip", "prompt", "saved tokens", *(f"{each} ms" for each in LAYOUTS), "cost x H", "auto"
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        times = " | ".join(f"{1e3 * row[each]:,.0f}" for each in LAYOUTS)
        lines.append(
            f"| {row['model']} | {row['chip']} | {row['prompt']} | {row['saved']:.1%} | {times} | "
            f"{row['merge_cost']:,.0f} | {row['auto']} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
