"""A GRPO step of hwgrpo compared with one of TRL: same weights, prompts, rewards, optimizer and threads, in one run.

Each side is a separate process with its own peak memory, of which the memory with torch and transformers imported is
subtracted in another column. They alternate: while one runs a block of steps the other waits for its next request and
uses no CPU. Before anything is timed, TRL samples a batch, both sides compute its loss and gradient, and a relative
difference above 1e-5 ends the benchmark.

    python benchmarks/against_trl.py --trl-python /path/to/venv-with-trl/bin/python --setting add --steps 60

hwgrpo logs metrics to a file at every step, TRL logs nothing; neither writes checkpoints or completions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

REPO = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-5
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


@dataclass(frozen=True)
class Setting:
    """A model, a task and the sizes of a step."""

    model: str
    data: str
    """A task of hwgrpo, or `random`: 64 random characters per prompt."""
    reward: str
    prompts: int
    n: int
    response_tokens: int
    lr: float


SETTINGS = {
    "add": Setting(
        "builtin://tiny?task=add&max=9&hidden=128&layers=2&steps=60", "task://add?max=9", EXACT, 32, 8, 4, 3e-4
    ),
    "sort": Setting("builtin://tiny?task=sort&hidden=64&layers=2", "task://sort", EXACT, 32, 8, 6, 5e-4),
    "8m": Setting("builtin://tiny?task=copy&hidden=320&layers=7&steps=1", "random", DIGITS, 16, 8, 32, 1e-4),
}
SMOKE = Setting("builtin://tiny?task=copy&hidden=32&layers=1&steps=1", "random", DIGITS, 2, 4, 4, 1e-4)
Sample = dict[str, Any]
"""A batch of responses to compare: prompts, tokens, rewards, loss, and a file with the loss's gradients."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check that both sides compute the same, then time them alternately."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of an environment with TRL")
    parser.add_argument("--setting", choices=tuple(SETTINGS), action="append", help="default: all")
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
    settings = {"smoke": SMOKE} if args.smoke else {name: SETTINGS[name] for name in args.setting or SETTINGS}
    results = []
    for name, setting in settings.items():
        with tempfile.TemporaryDirectory() as folder:
            results.append(_compare(name, setting, has_trl, args, Path(folder)))
    from hwgrpo.bench.machine import processor

    text = {"date": datetime.date.today().isoformat(), "cpu": processor(), "threads": args.threads, "results": results}
    if args.output:
        Path(args.output).write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    print(_table(results))
    return 0


def _has_trl(python: str) -> bool:
    code = "import importlib.util as u; raise SystemExit(u.find_spec('trl') is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def _compare(name: str, setting: Setting, has_trl: bool, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    _prepare(setting, folder)
    (folder / "setting.json").write_text(json.dumps(asdict(setting)))
    running = [_Side(side, args, folder) for side in ("trl", "hwgrpo")[not has_trl :]]
    ours = running[-1]
    agreement = ours.ask(running[0].ask("sample") if has_trl else _plain_sample(setting, folder))
    if max(agreement["loss"], agreement["gradient"]) > TOLERANCE:
        raise SystemExit(f"{name}: the first step differs: {agreement}")
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
            "versions": side.versions,
            "steps_to_target": _reached(side.rewards),
            "seconds_to_target": sum(side.clock[: _reached(side.rewards) or 0]) or None,
            "reward_last5": sum(side.rewards[-5:]) / 5,
        }
        side.close()
    return {"setting": name, "parameters": ours.parameters, "agreement": agreement, **sides}


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
        greeting = self._read()
        self.versions, self.parameters = greeting["versions"], greeting["parameters"]

    def ask(self, request: str | dict[str, Any]) -> dict[str, Any]:
        """Send a request ("steps N", "sample", "memory" or a batch) and return the reply."""
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


def _prepare(setting: Setting, folder: Path) -> None:
    """Write the model, the prompts and the reward function that both sides read."""
    import random
    import shutil

    from hwgrpo.data.tasks import parse_task
    from hwgrpo.models.loading import resolve_model_path

    shutil.copytree(resolve_model_path(setting.model), folder / "model")
    if setting.data == "random":
        draw = random.Random(0)
        letters = "abcdefghijklmnopqrstuvwxyz"
        rows = [{"prompt": "".join(draw.choices(letters, k=64)), "answer": ""} for _ in range(512)]
    else:
        task = parse_task(setting.data)
        rows = [{"prompt": r["prompt"], "answer": r["ground_truth"]} for r in task.splits["train"]]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(setting.reward)


def _plain_sample(setting: Setting, folder: Path) -> Sample:
    """Return random responses with their loss and gradient by plain transformers, one sequence at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()[: setting.prompts]]
    prompts = [row["prompt"] for row in rows for _ in range(setting.n)]
    prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    responses = torch.randint(len(tokenizer), (len(prompts), setting.response_tokens))
    rewards = torch.rand(setting.prompts, setting.n)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    loss = torch.zeros(())
    for ids, response, advantage in zip(prompt_ids, responses, advantages.flatten(), strict=True):
        sequence = torch.cat([torch.tensor(ids), response])
        logprobs = model(sequence[None]).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        ratio = (logprobs - logprobs.detach()).gather(-1, response[:, None]).exp()
        loss = loss - (advantage * ratio).sum() / responses.numel()
    loss.backward()
    file = folder / "gradients.safetensors"
    _save_gradients(model, file)
    return {
        "prompt": prompts,
        "prompt_ids": prompt_ids,
        "completion_ids": responses.tolist(),
        "rewards": rewards.flatten().tolist(),
        "loss": loss.item(),
        "gradients": str(file),
    }


def _save_gradients(model: Any, file: Path) -> None:
    from safetensors.torch import save_file

    # tied weights are one tensor with one gradient
    save_file({name: p.grad.clone() for name, p in model.named_parameters()}, file)


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

    run = _run_trl if args.side == "trl" else _run_hwgrpo
    run(setting, args, reply, memory)
    return 0


def _requests() -> Iterator[Any]:
    for line in sys.stdin:
        yield json.loads(line)


def _resident(field: str) -> float:
    """Return VmRSS, or its peak VmHWM, of this process in MiB; unlike ru_maxrss without that of its parent."""
    [line] = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024


def _run_hwgrpo(setting: Setting, args: argparse.Namespace, reply: Any, memory: Any) -> None:
    import torch
    from hwgrpo_backends.cpu import BACKEND
    from safetensors.torch import load_file

    from hwgrpo.config import load_config
    from hwgrpo.training.loop import train_step
    from hwgrpo.training.setup import build_run
    from hwgrpo.training.update.train_batch import advantages_over_ranks, assemble
    from hwgrpo.values import Completions, Prompt, PromptBatch, Rewards

    folder = args.folder
    settings = {
        "model.path": folder / "model",
        "data.train": folder / "train.jsonl",
        "data.chat": "never",
        "rollout.n": setting.n,
        "rollout.max_response_tokens": setting.response_tokens,
        "reward.functions": f"['{folder}/rewards.py:reward']",
        "algorithm.advantage.eps": 1e-4,
        "algorithm.loss.dual_clip": "null",
        "optim.lr": setting.lr,
        "optim.betas": "[0.9,0.95]",
        "trainer.prompts_per_step": setting.prompts,
        "trainer.max_steps": args.steps,
        "trainer.seed": args.seed,
        "trainer.threads": args.threads,
        "trainer.output_dir": folder / "hwgrpo",
        "observe.loggers": "[jsonl]",
        "observe.progress": "none",
        "observe.completions_per_step": 0,
    }
    run = build_run(load_config(None, [f"{key}={value}" for key, value in settings.items()]), BACKEND, 0, 1)
    model = run.update.policy.model
    spent = {"generate": 0.0, "reward": 0.0}
    generate, score = run.engine.generate, run.rewards.score

    def timed(batch: Any, sampling: Any) -> Any:
        began = time.perf_counter()
        done = generate(batch, sampling)
        spent["generate"] += time.perf_counter() - began
        return done

    def watched(*arguments: Any, **named: Any) -> Any:
        rewards = score(*arguments, **named)
        spent["reward"] = float(rewards.total.mean())
        return rewards

    run.engine.generate, run.rewards.score = timed, watched
    versions = {"torch": torch.__version__, "transformers": __import__("transformers").__version__}
    reply({"versions": versions, "parameters": sum(p.numel() for p in model.parameters())})
    step = 0
    for request in _requests():
        if request == "memory":
            reply(memory())
        elif isinstance(request, dict):
            groups = list(dict.fromkeys(request["prompt"]))
            prompts = PromptBatch(
                tuple(Prompt(p, p, tuple(request["prompt_ids"][request["prompt"].index(p)]), None, {}) for p in groups)
            )
            lengths = torch.tensor([len(ids) for ids in request["completion_ids"]])
            tokens = torch.tensor([token for ids in request["completion_ids"] for token in ids])
            offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            index = torch.tensor([groups.index(p) for p in request["prompt"]])
            assert bool((index.diff() >= 0).all()), "TRL's batch holds each prompt's samples together"
            texts = tuple("" for _ in groups for _ in range(setting.n))
            finished = torch.ones(len(lengths), dtype=torch.bool)
            sampled = Completions(index, tokens, offsets, torch.zeros(len(tokens)), finished, texts)
            total = torch.tensor(request["rewards"], dtype=torch.float64)
            rewards = Rewards(total, finished, {"reward": total})
            advantages, _ = advantages_over_ranks(run.config, sampled, rewards, run.strategy)
            batch = assemble(prompts, sampled, advantages, rewards.valid)
            loss, _ = run.update.accumulate_gradients(batch, range(len(batch)))
            theirs = load_file(request["gradients"])
            named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            assert named.keys() == theirs.keys(), named.keys() ^ theirs.keys()
            assert sum(float(g.norm()) for g in theirs.values()) > 0, "a batch without gradient compares nothing"
            gaps = [float((named[k] - g).norm() / g.norm().clamp_min(1e-12)) for k, g in theirs.items()]
            run.strategy.discard_gradients()
            reply({"loss": abs(loss - request["loss"]) / max(abs(request["loss"]), 1e-2), "gradient": max(gaps)})
        else:
            steps = []
            for _ in range(int(request.split()[1])):
                step += 1
                spent["generate"] = 0.0
                wall, cpu = time.perf_counter(), time.process_time()
                train_step(run, step)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                steps.append({"wall": wall, "cpu": cpu, **spent})
            reply({"steps": steps})


def _run_trl(setting: Setting, args: argparse.Namespace, reply: Any, memory: Any) -> None:
    import torch
    import transformers
    import trl  # pyright: ignore[reportMissingImports]  (only this side's environment has it)
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(args.threads)
    folder = args.folder
    scope: dict[str, Any] = {}
    exec((folder / "rewards.py").read_text(), scope)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    seen: dict[str, Any] = {"reward": 0.0, "generate": 0.0, "completion_ids": []}

    def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        values = scope["reward"](completions, **columns)
        seen.update(prompt=list(prompts), completion_ids=completion_ids, rewards=values)
        seen["reward"] = sum(values) / len(values)
        return values

    requests = _requests()
    clock = {"left": 0, "wall": 0.0, "cpu": 0.0}
    steps: list[dict[str, float]] = []
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}

    class Turns(TrainerCallback):
        """Callback that waits for a request before a block of steps and replies after it."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            while clock["left"] == 0:
                request = next(requests)
                if request == "sample":
                    reply(sample())
                else:
                    clock["left"] = int(request.split()[1])
            seen["generate"] = 0.0
            clock["wall"], clock["cpu"] = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wall, cpu = time.perf_counter() - clock["wall"], time.process_time() - clock["cpu"]
            steps.append({"wall": wall, "cpu": cpu, "generate": seen["generate"], "reward": seen["reward"]})
            clock["left"] -= 1
            if clock["left"] == 0:
                reply({"steps": list(steps)})
                steps.clear()

    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl.GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=setting.prompts * setting.n,
            num_generations=setting.n,
            max_completion_length=setting.response_tokens,
            max_steps=args.steps,
            learning_rate=setting.lr,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="dapo",
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            seed=args.seed,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=load_dataset("json", data_files=str(folder / "train.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Turns()],
    )
    single_turn = trainer._generate_single_turn

    def timed(prompt_ids: Any, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        done = single_turn(prompt_ids, *arguments, **named)
        seen["generate"] += time.perf_counter() - began
        seen["prompt_ids"] = prompt_ids
        return done

    trainer._generate_single_turn = timed

    def sample() -> dict[str, Any]:
        """Sample one batch as a step does; return it with the loss and a file of its gradient."""
        batch = next(iter(trainer.get_train_dataloader()))
        model.train()
        inputs = trainer._generate_and_score_completions(batch)
        loss = trainer._compute_loss(model, inputs)
        loss.backward()
        _save_gradients(model, folder / "gradients.safetensors")
        model.zero_grad(set_to_none=True)
        responses = {key: seen[key] for key in ("prompt", "prompt_ids", "completion_ids", "rewards")}
        return responses | {"loss": loss.item(), "gradients": str(folder / "gradients.safetensors")}

    reply({"versions": versions, "parameters": sum(p.numel() for p in model.parameters())})
    trainer.train()
    for request in requests:
        assert request == "memory", request
        reply(memory())


def _table(results: list[dict[str, Any]]) -> str:
    rows = [
        "| setting | side | step ms (wall) | step ms (CPU) | generate ms | rest ms | peak MiB | above imports "
        "| steps and s to 0.9 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for side in [side for side in ("trl", "hwgrpo") if side in result]:
            r = result[side]
            rest = r["wall"] - r["generate"]
            target = f"{r['steps_to_target']}, {r['seconds_to_target']:.1f}" if r["steps_to_target"] else "not reached"
            times = " | ".join(f"{1e3 * value:.1f}" for value in (r["wall"], r["cpu"], r["generate"], rest))
            name = f"{result['setting']}, {result['parameters']:,}"
            memory = f"{r['peak_mib']:.0f} | {r['above_imports_mib']:.0f}"
            rows.append(f"| {name} | {side} | {times} | {memory} | {target} |")
        if "trl" not in result:
            continue
        theirs, ours = result["trl"], result["hwgrpo"]
        ratios = [f"{theirs[key] / ours[key]:.2f}x" for key in ("wall", "cpu", "generate")]
        rest = (theirs["wall"] - theirs["generate"]) / (ours["wall"] - ours["generate"])
        memory = " | ".join(f"{theirs[key] / ours[key]:.2f}x" for key in ("peak_mib", "above_imports_mib"))
        rows.append(
            f"| | ratio | {' | '.join(ratios)} | {rest:.2f}x | {memory} | "
            f"loss {result['agreement']['loss']:.1e}, gradient {result['agreement']['gradient']:.1e} apart |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
