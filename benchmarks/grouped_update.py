"""An update with a group's prompt computed once (grouped) beside one with it in every row (padded).

A randomly initialized Qwen3, and one prompt of random characters; nearly all of its samples reach the length limit. As
in `hwgrpo bench step`, layouts alternate in rounds on the same responses, from the same weights, after both have
computed the same gradient within rounding.

    python benchmarks/grouped_update.py --size 7m --repeat 5 --output results.json

The exit code is 1 if the layouts compute different gradients.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "backends"), str(REPO / "kernels")]

SIZES: dict[str, dict[str, int]] = {
    "7m": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 7, "num_attention_heads": 4,
           "num_key_value_heads": 2, "vocab_size": 2048},
    "36m": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "num_attention_heads": 8,
            "num_key_value_heads": 4, "vocab_size": 8192},
    "smoke": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 1, "vocab_size": 128},
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the sizes; return 1 if layouts differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), action="append", help="default: 7m and 36m")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", help="write all rounds as JSON to this file")
    parser.add_argument("--smoke", action="store_true", help="one round of a tiny model")
    args = parser.parse_args(argv)
    if args.smoke:
        args.size, args.prompt_tokens, args.samples, args.response_tokens, args.repeat = ["smoke"], 16, 4, 4, 1
    results = [{"size": size, **measure(size, args)} for size in args.size or ("7m", "36m")]
    print("| parameters | layout | tokens fed | update s (wall) | as fast | (CPU) | as fast | gradient apart |")
    print("|---|---|---|---|---|---|---|---|")
    for result in results:
        for each in result["layouts"]:
            print(row(result, each))
    if args.output:
        Path(args.output).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(each["state"] != "timed" for result in results for each in result["layouts"]))


def row(result: dict[str, Any], layout: dict[str, Any]) -> str:
    """Return the row of a layout."""
    parameters = f"{result['model']['parameters'] / 1e6:.1f}M"
    if layout["state"] != "timed":
        return f"| {parameters} | {layout['name']} | | {layout['state']}: {layout['reason']} | | | | |"
    seconds = [median(layout[clock]) for clock in ("wall_s", "cpu_s")]
    ratios = [
        median(result["layouts"][0][clock]) / own for clock, own in zip(("wall_s", "cpu_s"), seconds, strict=True)
    ]
    times = " | ".join(f"{own:.2f} | {ratio:.2f}x" for own, ratio in zip(seconds, ratios, strict=True))
    return (
        f"| {parameters} | {layout['name']} | {layout['fed_tokens']:,} | {times} | {layout['apart']['gradient']:.1e} |"
    )


def measure(size: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return what `hwgrpo bench step` measures of a model's updates."""
    import torch
    from hwgrpo_backends import registry
    from hwgrpo_backends.device import Device
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    from hwgrpo.bench.step import measure_step
    from hwgrpo.config import load_config
    from hwgrpo.models.tiny import character_tokenizer
    from hwgrpo.training.setup import build_run

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="hwgrpo-grouped-") as folder:
        shape: dict[str, Any] = {**SIZES[size], "head_dim": 64, "max_position_embeddings": 4096}
        Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)).save_pretrained(f"{folder}/model")
        character_tokenizer("").save_pretrained(f"{folder}/model")
        prompt = "".join(random.Random(0).choices("abcdefgh", k=args.prompt_tokens))
        Path(folder, "rows.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "a"}) + "\n")
        # tokens without text would have equal rewards, with advantages of zero
        Path(folder, "reward.py").write_text(
            "import random\ndraw = random.Random(0)\n\n"
            "def score(solution_str, ground_truth):\n    return draw.random()\n"
        )
        settings = [
            f"model.path={folder}/model",
            f"data.train={folder}/rows.jsonl",
            f"data.max_prompt_tokens={args.prompt_tokens}",
            f"reward.functions=['{folder}/reward.py:score']",
            f"rollout.n={args.samples}",
            f"rollout.max_response_tokens={args.response_tokens}",
            "trainer.prompts_per_step=1",
            "trainer.max_steps=1",
            f"trainer.threads={args.threads}",
            f"trainer.output_dir={folder}/run",
            "observe.loggers=[jsonl]",
            "observe.progress=none",
            "observe.completions_per_step=0",
        ]
        backend = registry.get("cpu")
        run = build_run(load_config(None, settings), backend, 0, 1)
        try:
            return measure_step(run, Device(backend), ["padded", "grouped"], args.repeat).to_json()
        finally:
            run.close()
            run.strategy.close()


if __name__ == "__main__":
    raise SystemExit(main())
