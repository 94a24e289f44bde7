"""`hwgrpo eval`: a model's greedy accuracy and pass@k on prompts, scored by a recipe's rewards."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from hwgrpo.errors import ConfigError

HELP = "measure a model on prompts: greedy reward, mean reward of samples, pass@k"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("recipe", help="recipe YAML, or the folder of a run (its settings and its final model)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, e.g. data.validation=test.jsonl")
    parser.add_argument("--model", help="model to measure: folder, hub name or builtin://...")
    parser.add_argument("--n", type=int, default=8, help="samples per prompt at rollout.temperature (default 8)")
    parser.add_argument("--k", default="", help="ks of pass@k, e.g. 1,4,8 (default: 1 and n)")
    parser.add_argument("--success", type=float, default=1.0, help="reward from which a response passes (default 1.0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return the exit code."""
    from hwgrpo.cli.host import prepare_host
    from hwgrpo.config import load_config

    recipe, overrides = Path(args.recipe), list(args.overrides)
    if recipe.is_dir():
        final = recipe / "final"
        if not (recipe / "config.yaml").is_file():
            raise ConfigError(f"{recipe} is not the folder of a run: it has no config.yaml")
        if args.model is None and not final.is_dir():
            raise ConfigError(f"{recipe} has no final model; name one with --model")
        # final/ holds the merged model with its tokenizer: the run's own adapter must not be put on top
        whole = ("revision=null", "tokenizer=null", "lora.rank=0", "lora.adapter=null")
        overrides = [f"model.path={final}", *(f"model.{word}" for word in whole), *overrides]
        recipe = recipe / "config.yaml"
    if args.model is not None:
        overrides.append(f"model.path={args.model}")
    config = load_config(recipe, overrides)
    ks = _ks(args.k, args.n)
    host = prepare_host(config)

    from hwgrpo.observe.jsonlines import jsonable
    from hwgrpo.training.evaluate import build_evaluation

    evaluation = build_evaluation(config, host.backend, host.local_rank)
    greedy, sampled = evaluation.greedy(), evaluation.sampled(args.n)
    result = {
        "schema": "hwgrpo.eval/1",
        "model": config.model.path,
        "data": evaluation.dataset.name,
        "prompts": len(evaluation.dataset),
        "backend": host.backend.name,
        "n": args.n,
        "temperature": config.rollout.temperature,
        "greedy_reward": float(greedy.nanmean()),
        "mean_reward": float(sampled.nanmean()),
        "greedy_pass": float((greedy >= args.success).double().mean()),  # a sample without a reward has not passed
    }
    passed = (sampled >= args.success).sum(1).tolist()
    for k in ks:
        result[f"pass@{k}"] = sum(pass_at_k(args.n, c, k) for c in passed) / len(passed)
    if args.json:
        print(json.dumps(jsonable(result), indent=1, allow_nan=False))
        return 0
    for name, value in result.items():
        print(f"{name:>14}  {value:.4f}" if isinstance(value, float) else f"{name:>14}  {value}")
    return 0


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k samples passes.

    1 - C(n - passed, k) / C(n, k). Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    equation 1.

    Args:
        n: samples drawn.
        passed: those that passed.
        k: 1 <= k <= n.
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def _ks(text: str, n: int) -> list[int]:
    if n < 1:
        raise ConfigError(f"--n {n}: draw at least one sample")
    try:
        ks = sorted({int(word) for word in text.split(",")}) if text else sorted({1, n})
    except ValueError as error:
        raise ConfigError(f"--k {text!r}: give whole numbers separated by commas, e.g. 1,4,8") from error
    if ks[0] < 1 or ks[-1] > n:
        raise ConfigError(f"--k {text!r}: each k must lie between 1 and --n {n}")
    return ks
