"""`hwgrpo eval`: a model's greedy accuracy and pass@k on prompts, scored by a recipe's rewards."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hwgrpo.errors import ConfigError
from hwgrpo.support.text import terminal_line

if TYPE_CHECKING:
    import torch

    from hwgrpo.config import Config
    from hwgrpo.observe.completions import MakeRecords
    from hwgrpo.rewards.combine import RewardPipeline
    from hwgrpo.rewards.randomness import Seed
    from hwgrpo.values import Completions, PromptBatch, Rewards

HELP = "evaluate a model on prompts: greedy reward, mean reward of samples, pass@k"

MOST_IMAGES = 1000
"""Thumbnails that are written."""
UNUSED = ("algorithm", "optim", "observe", "trainer.strategy", "model.layout")
"""Settings that an evaluation does not use: a plug-in that they name may be absent."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "recipe",
        help="recipe YAML; or the folder of a run (its settings and its final model); or an adapter in that folder "
        "(RUN/final-adapter: the run's settings and base model, with the adapter on top); or a checkpoint of the run "
        "(RUN/checkpoints/step-00000050)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, e.g. data.validation=test.jsonl")
    parser.add_argument("--model", help="model to evaluate: folder, hub name or builtin://...")
    parser.add_argument(
        "--max-rows", type=int, help="evaluate the first rows only (default: all, whatever the recipe says)"
    )
    parser.add_argument("--n", type=int, default=8, help="samples per prompt at rollout.temperature (default 8)")
    parser.add_argument("--k", default="", help="ks of pass@k, e.g. 1,4,8 (default: 1 and n)")
    parser.add_argument("--success", type=float, default=1.0, help="lowest reward of a passing response (default 1.0)")
    parser.add_argument(
        "--completions",
        metavar="FILE",
        help="also write every response as JSON Lines, and thumbnails of images to a folder beside it (out.jsonl: "
        "out-images)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print; return the exit code."""
    from hwgrpo.cli.backend_selection import prepare_host

    config = evaluation_settings(args)
    ks = _ks(args.k, args.n)
    file = _open(args.completions)
    host = prepare_host(config)

    from hwgrpo.agents.agent_metrics import agent_metrics
    from hwgrpo.observe.logged_images import LoggedImages
    from hwgrpo.support.jsonlines import jsonable
    from hwgrpo.training.evaluate import build_evaluation

    evaluation = build_evaluation(config, host.backend, host.local_rank, checkpoint_of(args))
    for note in evaluation.notes:
        print(f"hwgrpo: {note}", file=sys.stderr)
    if file is None:
        results = evaluation.greedy(), evaluation.sampled(args.n)
    else:
        path = Path(args.completions)
        images = LoggedImages(path.with_name(f"{path.stem}-images"), MOST_IMAGES)
        images.remove_others(())  # of an earlier evaluation
        recording = partial(_Recording, evaluation.rewards, file, images.records)
        with file:
            results = (
                replace(evaluation, rewards=recording("greedy")).greedy(),
                replace(evaluation, rewards=recording("sampled")).sampled(args.n),
            )
    evaluation.rewards.close()
    greedy, sampled = results
    failed = sum(bool(outcome["failure"]) for outcome in sampled.outcomes)
    result = {
        "schema": "hwgrpo.eval/1",
        "model": config.model.path,
        **({"checkpoint": str(checkpoint_of(args))} if checkpoint_of(args) else {}),
        **({"adapter": config.model.lora.adapter} if config.model.lora.adapter else {}),
        "data": evaluation.dataset.name,
        "prompts": len(evaluation.dataset),
        "rows": evaluation.dataset.available,
        **({"prompts_with_images": seeing} if (seeing := evaluation.dataset.prompts_with_images) else {}),
        "backend": host.backend.name,
        "n": args.n,
        "temperature": config.rollout.temperature,
        "success": args.success,
        **({"groups_dropped": greedy.dropped + sampled.dropped} if config.rollout.group_timeout is not None else {}),
        **figures(greedy.rewards, sampled.rewards, ks, args.success),
    }
    if sampled.outcomes:
        agents = agent_metrics(sampled.outcomes)
        result |= {"mean_turns": agents["agent/turns/mean"], "mean_calls": agents["tools/call_frequency"]}
        result["failed"] = f"{failed} of {len(sampled.outcomes)}" if not args.json else failed
    of_greedy = greedy.by_environment()
    environments = {
        name: {"prompts": len(rewards), **figures(of_greedy[name], rewards, ks, args.success)}
        for name, rewards in sampled.by_environment().items()
        if name in of_greedy
    }
    if args.json:
        result |= {"environments": environments} if environments else {}
        print(json.dumps(jsonable(result), indent=1, allow_nan=False))
        return 0
    _print(result)
    for name, own in environments.items():
        print(f"\nenvironment {terminal_line(name)}")
        _print(own)
    return 0


def figures(greedy: torch.Tensor, sampled: torch.Tensor, ks: Sequence[int], success: float) -> dict[str, float]:
    """Return mean rewards, the share of passing greedy responses, and pass@k; a sample without reward has not passed.

    Args:
        greedy: [P, 1] rewards, NaN: none.
        sampled: [P, n] rewards.
        ks: the ks of pass@k.
        success: lowest reward that passes.
    """
    passed = (sampled >= success).sum(1).tolist()
    return {
        "greedy_reward": float(greedy.nanmean()),
        "mean_reward": float(sampled.nanmean()),
        "greedy_pass": float((greedy >= success).double().mean()),
        **{f"pass@{k}": sum(pass_at_k(sampled.shape[1], each, k) for each in passed) / len(passed) for k in ks},
    }


def _print(result: Mapping[str, object]) -> None:
    for name, value in result.items():
        if name == "schema":
            continue
        print(f"{name:>14}  {value:.4f}" if isinstance(value, float) else f"{name:>14}  {terminal_line(str(value))}")


def evaluation_settings(args: argparse.Namespace, *, all_rows: bool = True) -> Config:
    """Return the settings of the evaluation.

    Args:
        args: `recipe`, `overrides`, `model` and `max_rows`.
        all_rows: read all rows, whatever the recipe says, unless `max_rows` limits them.

    Raises:
        ConfigError: the folder is neither a run's nor an adapter or a checkpoint in it, or has no model.
    """
    from hwgrpo.cli.stored_code import check_trust, print_code
    from hwgrpo.config import load_config
    from hwgrpo.config.load import unset_variables
    from hwgrpo.config.rollout_rules import check_rollout
    from hwgrpo.config.schema import LoraConfig
    from hwgrpo.data.missing_data import missing_data
    from hwgrpo.rollout.engine_kind import engine_kind

    recipe, overrides = Path(args.recipe), list(args.overrides)
    checkpoint = checkpoint_of(args)
    if checkpoint is not None:
        recipe = checkpoint.resolve().parent.parent / "config.yaml"
        if args.model is not None:
            raise ConfigError(f"--model {args.model}: {checkpoint} has its own weights; omit one of them")
        if not recipe.is_file():
            raise ConfigError(f"{checkpoint} is not in the checkpoints/ of a run: {recipe} does not exist")
    elif recipe.is_dir():
        adapter = recipe if (recipe / "adapter_config.json").is_file() else None
        run = recipe.resolve().parent if adapter else recipe
        final = run / "final"
        if not (run / "config.yaml").is_file():
            raise ConfigError(f"{run} is not the folder of a run: it has no config.yaml")
        if args.model is None and adapter is None and not final.is_dir():
            raise ConfigError(f"{run} has no final model (did the run finish?); name one with --model")
        # An adapter brings its own settings, and final/ is the merged model with its tokenizer: either way those of
        # the run's adapter go back to their defaults.
        lora = [f"model.lora.{field.name}={_yaml(getattr(LoraConfig(), field.name))}" for field in fields(LoraConfig)]
        if adapter is not None:
            overrides = [*lora, f"model.lora.adapter={adapter}", *overrides]
        else:
            overrides = [f"model.path={final}", "model.revision=null", "model.tokenizer=null", *lora, *overrides]
        recipe = run / "config.yaml"
    if args.model is not None:
        overrides.append(f"model.path={args.model}")
    is_stored = recipe != Path(args.recipe)
    if is_stored:
        print_code(recipe)
    if args.max_rows is not None and args.max_rows < 1:
        raise ConfigError(f"--max-rows {args.max_rows}: use 1 or more, or leave it out for all rows")
    limit = [] if args.max_rows is None else [f"data.validation_max_rows={args.max_rows}"]
    overrides = [*(["data.validation_max_rows=0"] if all_rows else []), *overrides, *limit]
    config = load_config(
        recipe,
        overrides,
        imported=["data.validation_max_rows"],
        data_may_be_missing=True,
        variables_may_be_missing=True,
        unread=UNUSED,
    )
    if is_stored:
        given = [each.partition("=")[0] for each in args.overrides]
        check_trust(config, given, "add {}=true to the command")
    if config.data.template_date is None and recipe.is_file():
        config.data.template_date = _date_of_run(recipe.parent)
    for problem in missing_data(config):
        if not problem.startswith("data.train="):  # which an evaluation does not read
            raise ConfigError(problem)
    # One process evaluates it, however many ranks trained it.
    config.trainer.strategy, config.trainer.sequence_parallel_size, config.trainer.tensor_parallel_size = "single", 1, 1
    if config.rollout.engine == "auto" and config.rollout.server.url is not None:
        config.rollout.engine = "vllm_server"  # as a run has it; without a server an evaluation takes local for auto
        check_rollout(config)
    if config.rollout.engine == "vllm":  # a server has devices of its own
        config.rollout.tensor_parallel_size = 1
    unset = unset_variables(config)
    address = next((key for key in unset if key.startswith("rollout.server.url")), None)
    if address is not None and engine_kind(config.rollout).on_server:
        raise ConfigError(
            f"{address} needs the environment variable {unset[address]}, which is not set; export it, or use "
            "rollout.engine=local"
        )
    for key, variable in unset.items():
        print(
            f"hwgrpo: warning: {key} is null: the environment variable {variable} is not set; export it if "
            f"{key} is needed",
            file=sys.stderr,
        )
    return config


def _date_of_run(folder: Path) -> str | None:
    """Return the date that a run's chat templates write; None where the folder is no run's, or an older one's."""
    from hwgrpo.support.run_files import read_whole
    from hwgrpo.support.template_clock import read_date

    try:
        date = json.loads(read_whole(folder / "environment.json"))["template_date"]
        return None if read_date(date) is None else date
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # a ConfigError is a ValueError
        return None


def checkpoint_of(args: argparse.Namespace) -> Path | None:
    """Return the checkpoint, if the argument names one."""
    folder = Path(args.recipe)
    return folder if (folder / "manifest.json").is_file() else None


def _yaml(value: object) -> str:
    return json.dumps(value)  # JSON is YAML


def _open(path: str | None) -> TextIO | None:
    if path is None:
        return None
    try:
        return open(path, "w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--completions {path} cannot be written: {error.strerror}") from error


class _Recording:
    """Reward pipeline that also writes each scored response, as `completions.sample_record` plus `kind`."""

    def __init__(self, rewards: RewardPipeline, file: TextIO, images: MakeRecords, kind: str) -> None:
        self._rewards, self._file, self._images, self._kind = rewards, file, images, kind

    def score(
        self, batch: PromptBatch, completions: Completions, step: int | None = None, *, drawing: Seed | None = None
    ) -> Rewards:
        """Score as the pipeline does."""
        from hwgrpo.observe.completions import dropped_records, sample_record
        from hwgrpo.support.jsonlines import jsonable

        rewards = self._rewards.score(batch, completions, step, drawing=drawing)
        scored = (sample_record(i, batch, completions, rewards, self._images) for i in range(len(completions)))
        for each in (*scored, *dropped_records(batch, completions)):
            record = {"kind": self._kind, **each}
            self._file.write(json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n")
        return rewards


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of k samples passes.

    1 - C(n - passed, k) / C(n, k). Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    equation 1.

    Args:
        n: number of samples.
        passed: number of passing samples.
        k: 1 <= k <= n.
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def _ks(text: str, n: int) -> list[int]:
    if n < 1:
        raise ConfigError(f"--n {n}: use at least one sample")
    try:
        ks = sorted({int(each) for each in text.split(",")}) if text else sorted({1, n})
    except ValueError as error:
        raise ConfigError(f"--k {text!r}: use integers separated by commas, e.g. 1,4,8") from error
    if ks[0] < 1 or ks[-1] > n:
        raise ConfigError(f"--k {text!r}: each k must be between 1 and --n {n}")
    return ks
