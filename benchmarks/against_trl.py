"""A GRPO step of hwgrpo compared with one of TRL: same weights, prompts, rewards, optimizer and threads, in one run.

Each side is a separate process with its own peak memory, of which the memory with torch and transformers imported is
subtracted in another column. They alternate: while one runs a block of steps the other waits for its next request and
uses no CPU. Before anything is timed, TRL samples a batch, both sides compute its loss and gradient, and a relative
difference above 1e-5 ends the benchmark, of a published model one of the full gradient; in bf16, one above what
rounding explains. The steps are those of new processes, whose peak memory is theirs alone.

    python benchmarks/against_trl.py --trl-python /path/to/venv-with-trl/bin/python --setting add --steps 60
    python benchmarks/against_trl.py --trl-python ... --setting arithmetic --model FOLDER --dtype bfloat16 --threads 2

`arithmetic` is the recipe smollm2_135m_arithmetic with the model of a folder: its rows, prompts, adapters and sizes.
Both sides start with the same adapters and also report the reward of every step, and the share of held-out rows that
greedy responses solve, before and after. In bf16, TRL gets what its users do: a model loaded in bf16 and `bf16=True`.

Equal on both sides: PPO clipping at 0.2, rewards centred by their group's mean and divided by its standard deviation +
1e-4, the mean loss over all tokens of a step, no KL term, AdamW, a constant learning rate, a gradient norm of at most
1, no activation checkpointing. hwgrpo logs metrics to a file at every step, TRL logs nothing; neither writes
checkpoints or completions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from step_comparison.hwgrpo_side import run_hwgrpo
from step_comparison.plain_batch import plain_sample
from step_comparison.setting import Setting
from step_comparison.trl_side import run_trl

REPO = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-5
ROUNDINGS = 24
"""Roundings of a value on its way through a layer of a transformer and back, one after another."""
TARGET = 0.9
"""Mean reward of the last five steps at which the task counts as learned."""

EXACT = """
def reward(completions, answer, **columns):
    return [float(c.strip() == a) for c, a in zip(completions, answer)]
"""
DIGITS = """
def reward(completions, answer, **columns):
    return [sum(ch.isdigit() for ch in c) / max(len(c), 1) for c in completions]
"""
LAST_NUMBER = """
from hwgrpo.rewards.verifiers.reasoning_gym_score import answer_in

def reward(completions, answer, **columns):
    return [float(answer_in(c, "number", "") == a) for c, a in zip(completions, answer)]
"""
"""The reward of the recipe, which needs nothing that TRL's environment lacks."""

SETTINGS = {
    "add": Setting(
        "builtin://tiny?task=add&max=9&hidden=128&layers=2&steps=60", "task://add?max=9", EXACT, 32, 8, 4, 3e-4
    ),
    "sort": Setting("builtin://tiny?task=sort&hidden=64&layers=2", "task://sort", EXACT, 32, 8, 6, 5e-4),
    "8m": Setting("builtin://tiny?task=copy&hidden=320&layers=7&steps=1", "random", DIGITS, 16, 8, 32, 1e-4),
}
SMOKE = Setting("builtin://tiny?task=copy&hidden=32&layers=1&steps=1", "random", DIGITS, 2, 4, 4, 1e-4)
RECIPES = {"arithmetic": "smollm2_135m_arithmetic"}
"""Setting -> recipe, for the model of a folder."""
SMOKE_RECIPE = (
    *("data.train=task://add?max=9", "data.validation=null", "data.chat=auto", "data.few_shot=[]"),
    *("trainer.prompts_per_step=2", "rollout.n=4", "rollout.max_response_tokens=4"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Check that both sides compute the same, then time them alternately."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of an environment with TRL")
    parser.add_argument("--setting", choices=(*SETTINGS, *RECIPES), action="append", help="default: all but arithmetic")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="the model of arithmetic, in Hugging Face format")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="compute dtype of both sides"
    )
    parser.add_argument("--steps", type=int, default=60, help="timed steps per side, after 5 for warm-up")
    parser.add_argument("--block", type=int, default=5, help="steps per turn of a side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="write the results as JSON to this file")
    parser.add_argument("--smoke", action="store_true", help="one tiny step; only hwgrpo if TRL is not installed")
    parser.add_argument("--side", choices=("hwgrpo", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.side:
        return _side(args)
    has_trl = _has_trl(args.trl_python)
    if not has_trl:
        missing = f"{args.trl_python} has no TRL: {args.trl_python} -m pip install trl, or name another by --trl-python"
        if not args.smoke:
            raise SystemExit(missing)
        print(f"hwgrpo alone, compared with its definition in plain transformers: {missing}")
    if args.smoke:
        args.steps, args.block = 1, 1
    results = []
    for name, setting in _settings(args).items():
        with tempfile.TemporaryDirectory() as folder:
            results.append(_compare(name, setting, has_trl, args, Path(folder)))
    from hwgrpo.bench.machine import processor

    text = {"date": datetime.date.today().isoformat(), "cpu": processor(), "threads": args.threads, "results": results}
    if args.output:
        Path(args.output).write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    print(_table(results))
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Setting]:
    """Return the settings to measure, by name."""
    names = args.setting or SETTINGS
    if args.model is None and any(name in RECIPES for name in names):
        remedy = "python scripts/fetch_smollm2.py FOLDER makes a model, --model FOLDER names it"
        raise SystemExit(f"--setting {' '.join(RECIPES)} needs --model: {remedy}")
    if args.model is not None and not all(name in RECIPES for name in names):
        raise SystemExit(f"--model is for --setting {' '.join(RECIPES)}; leave it out, or name that setting alone")
    if args.model is None and args.smoke:
        settings = {"smoke": SMOKE}
    else:
        settings = {name: SETTINGS.get(name) or _setting_of(RECIPES[name], args) for name in names}
    return {name: replace(setting, dtype=args.dtype) for name, setting in settings.items()}


def _setting_of(recipe: str, args: argparse.Namespace) -> Setting:
    """Return the setting of a recipe with the model of a folder."""
    from hwgrpo.config import load_config

    config = load_config(recipe, [f"model.path={args.model}", *(SMOKE_RECIPE if args.smoke else ())])
    return Setting(
        model=str(args.model),
        data=recipe,
        reward=LAST_NUMBER,
        prompts=config.trainer.prompts_per_step,
        n=config.rollout.n,
        response_tokens=config.rollout.max_response_tokens,
        lr=config.optim.lr,
        beta2=config.optim.betas[1],
        lora_rank=config.model.lora.rank,
        lora_alpha=config.model.lora.alpha,
        trl_rows=config.rollout.n,
    )


def _has_trl(python: str) -> bool:
    code = "import importlib.util as u; raise SystemExit(u.find_spec('trl') is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def _compare(name: str, setting: Setting, has_trl: bool, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    _prepare(setting, folder, args.smoke)
    (folder / "setting.json").write_text(json.dumps(asdict(setting)))
    names = ("trl", "hwgrpo")[not has_trl :]
    comparing = [_Side(side, args, folder) for side in names]
    agreement = comparing[-1].ask(comparing[0].ask("sample") if has_trl else plain_sample(setting, folder))
    tolerances = _tolerances(setting, folder)
    if any(agreement[key] > limit for key, limit in tolerances.items()):
        raise SystemExit(f"{name}: the first step differs: {agreement}, at most {tolerances}")
    held_out = (folder / "validation.jsonl").exists()
    before = {side.name: side.ask("greedy") for side in comparing if held_out}
    for side in comparing:
        side.close()
    running = [_Side(side, args, folder) for side in names]  # without what the comparison leaves in memory
    ours = running[-1]
    turns: dict[str, list[dict[str, Any]]] = {side.name: [] for side in running}
    for turn in range(-1, args.steps // args.block):
        for side in running:
            steps = side.ask(f"steps {args.block}")["steps"]
            if turn >= 0:  # the first turn warms up
                turns[side.name] += steps
            side.rewards += [step["reward"] for step in steps]
            side.clock += [step["wall"] for step in steps]
    sides = {}
    for side in running:
        steps = turns[side.name]
        sides[side.name] = {
            **{key: median(step[key] for step in steps) for key in ("wall", "cpu", "generate")},
            **side.ask("memory"),
            **side.greeting,
            "steps_to_target": _reached(side.rewards),
            "seconds_to_target": sum(side.clock[: _reached(side.rewards) or 0]) or None,
            "reward_first5": sum(side.rewards[:5]) / len(side.rewards[:5]),
            "reward_last5": sum(side.rewards[-5:]) / len(side.rewards[-5:]),
            "rewards": side.rewards,
            "seconds": side.clock,
        }
        if held_out:
            sides[side.name] |= {"greedy_before": before[side.name], "greedy_after": side.ask("greedy")}
        side.close()
    shown = {"setting": name, "dtype": setting.dtype, "parameters": ours.greeting["parameters"]}
    sizes = asdict(setting) | ({} if "://" in setting.model else {"model": Path(setting.model).name})
    return {**shown, "sizes": sizes, "agreement": agreement, "tolerances": tolerances, **sides}


def _tolerances(setting: Setting, folder: Path) -> Mapping[str, float]:
    """Return the largest difference of each comparison.

    A small model's tensors are compared each. Of a published model, whose tensors can nearly cancel over responses with
    centred rewards, the full gradient is. In bf16, each of `ROUNDINGS` values per layer, one computed from the other,
    is off by up to 2**-8 of itself; the errors of both sides are independent and add up like steps of a random walk.
    The loss depends on rewards and lengths alone, since the ratios of a first step are 1.
    """
    if setting.dtype == "float32":
        return {"loss": TOLERANCE, "full_gradient" if setting.data in RECIPES.values() else "gradient": TOLERANCE}
    layers = json.loads((folder / "model" / "config.json").read_text())["num_hidden_layers"]
    return {"loss": TOLERANCE, "full_gradient": 2**-8 * (2 * ROUNDINGS * layers) ** 0.5}


def _reached(rewards: list[float]) -> int | None:
    """Return the first step at which the mean of the last five rewards reached the target, or None."""
    return next((i for i in range(5, len(rewards) + 1) if sum(rewards[i - 5 : i]) / 5 >= TARGET), None)


class _Side:
    """The process of a side; it is idle between requests."""

    def __init__(self, name: str, args: argparse.Namespace, folder: Path) -> None:
        self.name = name
        self.rewards: list[float] = []
        self.clock: list[float] = []
        total = (args.steps // args.block + 1) * args.block
        arguments = ["--side", name, "--folder", str(folder), "--steps", str(total), "--seed", str(args.seed)]
        source = os.pathsep.join(str(REPO / part) for part in (".", "backends", "kernels"))
        threads = str(args.threads)
        self._process = subprocess.Popen(
            [args.trl_python if name == "trl" else sys.executable, __file__, *arguments, "--threads", threads],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"},
        )
        self.greeting = self._read()

    def ask(self, request: str | dict[str, Any]) -> dict[str, Any]:
        """Send a request ("steps N", "sample", "greedy", "memory" or a batch) and return the reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.name} side ended with status {self._process.wait()}")
        return json.loads(line)


def _prepare(setting: Setting, folder: Path, smoke: bool) -> None:
    """Write the model, the prompts and the reward function that both sides read."""
    import shutil

    from hwgrpo.models.loading import resolve_model_path

    shutil.copytree(resolve_model_path(setting.model), folder / "model")
    for split, rows in _rows(setting, smoke).items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(setting.reward)


def _rows(setting: Setting, smoke: bool) -> dict[str, list[dict[str, str]]]:
    """Return rows `{prompt, answer}` of each split; those of a recipe are prompts after the chat template."""
    import random

    from hwgrpo.config import load_config
    from hwgrpo.data.prompts import build_dataset
    from hwgrpo.data.tasks import parse_task
    from hwgrpo.models.loading import load_tokenizer

    if setting.data == "random":
        draw = random.Random(0)
        letters = "abcdefghijklmnopqrstuvwxyz"
        return {"train": [{"prompt": "".join(draw.choices(letters, k=64)), "answer": ""} for _ in range(512)]}
    if setting.data not in RECIPES.values():
        task = parse_task(setting.data)
        return {"train": [{"prompt": r["prompt"], "answer": r["ground_truth"]} for r in task.splits["train"]]}
    config = load_config(setting.data, [f"model.path={setting.model}", *(SMOKE_RECIPE if smoke else ())])
    tokenizer = load_tokenizer(config.model)
    splits = {}
    for split in ("train", "validation"):
        dataset = build_dataset(config.data, tokenizer, split)
        assert dataset is not None
        prompts = [dataset.prompt(row, 0) for row in range(len(dataset))]
        splits[split] = [{"prompt": prompt.text, "answer": prompt.ground_truth} for prompt in prompts]
    return splits


def _side(args: argparse.Namespace) -> int:
    """Reply to requests on stdout until stdin ends; all other output goes to stderr."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setting = Setting(**json.loads((args.folder / "setting.json").read_text()))

    def reply(value: dict[str, Any]) -> None:
        stdout.write(json.dumps(value) + "\n")
        stdout.flush()

    # torch imports it wherever it is installed, for 70 MiB; the CPU build of torch does not install it
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
    import torch
    import transformers

    assert torch.__version__
    assert transformers.__version__
    imported = _resident("VmRSS")

    def memory() -> dict[str, float]:
        peak = _resident("VmHWM")
        return {"peak_mib": peak, "above_imports_mib": peak - imported}

    run = run_trl if args.side == "trl" else run_hwgrpo
    run(setting, args, reply, memory)
    return 0


def _resident(field: str) -> float:
    """Return VmRSS, or its peak VmHWM, of this process in MiB; unlike ru_maxrss without that of its parent."""
    [line] = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024


def _table(results: list[dict[str, Any]]) -> str:
    held_out = any("greedy_before" in result["hwgrpo"] for result in results)
    names = "| setting | side | step ms (wall) | step ms (CPU) | generate ms | rest ms | peak MiB | above imports "
    names += "| reward: first and last 5 steps | greedy: before, after |" if held_out else "| steps and s to 0.9 |"
    rows = [names, "|---" * (names.count("|") - 1) + "|"]
    for result in results:
        for side in [side for side in ("trl", "hwgrpo") if side in result]:
            r = result[side]
            rest = r["wall"] - r["generate"]
            times = " | ".join(f"{1e3 * value:.1f}" for value in (r["wall"], r["cpu"], r["generate"], rest))
            name = f"{result['setting']}, {result['parameters']:,}"
            if result["dtype"] != "float32":
                name += f", {result['dtype']}"
            memory = f"{r['peak_mib']:.0f} | {r['above_imports_mib']:.0f}"
            rows.append(f"| {name} | {side} | {times} | {memory} | {_learned(r)} |")
        if "trl" not in result:
            continue
        theirs, ours = result["trl"], result["hwgrpo"]
        ratios = [f"{theirs[key] / ours[key]:.2f}x" for key in ("wall", "cpu", "generate")]
        rest = (theirs["wall"] - theirs["generate"]) / (ours["wall"] - ours["generate"])
        memory = " | ".join(f"{theirs[key] / ours[key]:.2f}x" for key in ("peak_mib", "above_imports_mib"))
        gradient = "gradient" if "gradient" in result["tolerances"] else "full_gradient"
        apart = f"loss {result['agreement']['loss']:.1e}, gradient {result['agreement'][gradient]:.1e} apart"
        apart += " |" * held_out
        rows.append(f"| | ratio | {' | '.join(ratios)} | {rest:.2f}x | {memory} | {apart} |")
    return "\n".join(rows)


def _learned(side: Mapping[str, Any]) -> str:
    if "greedy_before" not in side:
        return (
            f"{side['steps_to_target']}, {side['seconds_to_target']:.1f}" if side["steps_to_target"] else "not reached"
        )
    accuracies = (side[key]["accuracy"] for key in ("greedy_before", "greedy_after"))
    rewards = f"{side['reward_first5']:.3f}, {side['reward_last5']:.3f}"
    return f"{rewards} | {', '.join(f'{accuracy:.3f}' for accuracy in accuracies)}"


if __name__ == "__main__":
    sys.exit(main())
