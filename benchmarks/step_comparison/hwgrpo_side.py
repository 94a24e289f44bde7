"""The side of hwgrpo: steps, a comparison with a batch of the other side, greedy responses."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from step_comparison.setting import COMPARED_SCALE, Sample, Setting, parameter_counts, requests, set_adapter, versions


def run_hwgrpo(setting: Setting, args: argparse.Namespace, reply: Any, memory: Any) -> None:
    """Build a run and reply to requests until there are no more."""
    from hwgrpo_backends.cpu import BACKEND

    from hwgrpo.config import load_config
    from hwgrpo.training.evaluate import scores
    from hwgrpo.training.loop import train_step
    from hwgrpo.training.setup import build_run

    run = build_run(load_config(None, _settings(setting, args)), BACKEND, 0, 1)
    model = run.update.policy.model
    if setting.lora_rank:
        set_adapter(model, scale_b=0.0)
        run.engine.update_weights(0)
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
    reply({"versions": versions("torch", "transformers"), **parameter_counts(model)})
    step = 0
    for request in requests():
        if request == "memory":
            reply(memory())
        elif request == "greedy":
            assert run.validation is not None
            greedy = replace(run.sampling, n=1, greedy=True)
            total = scores(run.engine, run.validation, run.rewards, greedy, range(len(run.validation))).rewards
            reply({"accuracy": float(total.mean()), "rows": len(total)})
        elif isinstance(request, dict):
            reply(_compare(run, model, setting, request))
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


def _settings(setting: Setting, args: argparse.Namespace) -> list[str]:
    folder = args.folder
    settings = {
        "model.path": folder / "model",
        "model.dtype": setting.dtype,
        "data.train": folder / "train.jsonl",
        "data.chat": "never",
        "rollout.n": setting.n,
        "rollout.max_response_tokens": setting.response_tokens,
        "reward.functions": f"['{folder}/rewards.py:reward']",
        "algorithm.advantage.eps": 1e-4,
        "algorithm.loss.dual_clip": "null",
        "optim.lr": setting.lr,
        "optim.betas": f"[0.9,{setting.beta2}]",
        "trainer.prompts_per_step": setting.prompts,
        "trainer.max_steps": args.steps,
        "trainer.seed": args.seed,
        "trainer.threads": args.threads,
        "trainer.output_dir": folder / "hwgrpo",
        "observe.loggers": "[jsonl]",
        "observe.progress": "none",
        "observe.completions_per_step": 0,
    }
    if setting.lora_rank:
        settings |= {"model.lora.rank": setting.lora_rank, "model.lora.alpha": setting.lora_alpha}
    if (folder / "validation.jsonl").exists():
        settings |= {"data.validation": folder / "validation.jsonl"}
    return [f"{key}={value}" for key, value in settings.items()]


def _compare(run: Any, model: Any, setting: Setting, sample: Sample) -> dict[str, Any]:
    """Return how far this side's loss and gradients on a batch are from those of the other side."""
    import torch
    from safetensors.torch import load_file

    from hwgrpo.training.update.train_batch import advantages_over_ranks, assemble
    from hwgrpo.values import Completions, Prompt, PromptBatch, Rewards

    groups = list(dict.fromkeys(sample["prompt"]))
    prompt_ids = [sample["prompt_ids"][sample["prompt"].index(prompt)] for prompt in groups]
    assert [run.tokenizer(prompt)["input_ids"] for prompt in groups] == prompt_ids, "the tokens of prompts differ"
    prompts = PromptBatch(tuple(Prompt(p, p, tuple(ids), None, {}) for p, ids in zip(groups, prompt_ids, strict=True)))
    lengths = torch.tensor([len(ids) for ids in sample["completion_ids"]])
    tokens = torch.tensor([token for ids in sample["completion_ids"] for token in ids])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    index = torch.tensor([groups.index(p) for p in sample["prompt"]])
    assert bool((index.diff() >= 0).all()), "TRL's batch holds each prompt's samples together"
    texts = tuple("" for _ in groups for _ in range(setting.n))
    finished = torch.ones(len(lengths), dtype=torch.bool)
    sampled = Completions(index, tokens, offsets, torch.zeros(len(tokens)), finished, texts)
    total = torch.tensor(sample["rewards"], dtype=torch.float64)
    rewards = Rewards(total, finished, {"reward": total})
    estimator, functions = run.config.algorithm.advantage, run.config.reward.functions
    advantages, _ = advantages_over_ranks(estimator, functions, sampled, rewards, run.strategy)
    batch = assemble(prompts, sampled, advantages, rewards.valid)
    if setting.lora_rank:
        set_adapter(model, scale_b=COMPARED_SCALE)
    loss, _ = run.update.accumulate_gradients(batch, range(len(batch)))
    theirs = load_file(sample["gradients"])
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    norm = sum(float(g.norm()) ** 2 for g in theirs.values()) ** 0.5
    assert norm > 0, "a batch without gradient compares nothing"
    gaps = {name: float((ours[name] - g).norm()) for name, g in theirs.items()}
    largest = max(gap / max(float(theirs[name].norm()), 1e-12) for name, gap in gaps.items())
    run.strategy.discard_gradients()
    if setting.lora_rank:
        set_adapter(model, scale_b=0.0)
    return {
        "loss": abs(loss - sample["loss"]) / max(abs(sample["loss"]), 1e-2),
        "gradient": largest,
        "full_gradient": sum(gap**2 for gap in gaps.values()) ** 0.5 / norm,
    }
