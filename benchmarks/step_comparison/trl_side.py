"""The side of TRL: steps, a batch to compare, greedy responses."""

from __future__ import annotations

import argparse
import time
from typing import Any

from step_comparison.setting import (
    COMPARED_SCALE,
    Sample,
    Setting,
    adapters,
    parameter_counts,
    read_rows,
    requests,
    save_gradients,
    set_adapter,
    versions,
)


def run_trl(setting: Setting, args: argparse.Namespace, reply: Any, memory: Any) -> None:
    """Build a trainer, train when steps are requested, and reply to requests until there are no more."""
    import torch
    import trl  # pyright: ignore[reportMissingImports]  (only this side's environment has it)
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(args.threads)
    folder = args.folder
    scope: dict[str, Any] = {}
    exec((folder / "rewards.py").read_text(), scope)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    seen: dict[str, Any] = {"reward": 0.0, "generate": 0.0, "completion_ids": []}

    def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        values = scope["reward"](completions, **columns)
        seen.update(prompt=list(prompts), completion_ids=completion_ids, rewards=values)
        seen["reward"] = sum(values) / len(values)
        return values

    incoming = requests()
    clock = {"left": 0, "wall": 0.0, "cpu": 0.0}
    steps: list[dict[str, float]] = []

    class Turns(TrainerCallback):
        """Callback that waits for a request before a block of steps and replies after it."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            while clock["left"] == 0:
                request = next(incoming, None)
                if request is None:  # this process was for the comparison alone
                    raise SystemExit
                if request == "sample":
                    reply(sample())
                elif request == "greedy":
                    reply(greedy())
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

    sequences = setting.prompts * setting.n
    rows = setting.trl_rows or sequences
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, setting.dtype)),
        reward_funcs=reward,
        args=trl.GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=sequences // rows,
            num_generations=setting.n,
            max_completion_length=setting.response_tokens,
            max_steps=args.steps,
            learning_rate=setting.lr,
            lr_scheduler_type="constant",
            adam_beta2=setting.beta2,
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="dapo",
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=setting.dtype == "bfloat16",
            seed=args.seed,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=load_dataset("json", data_files=str(folder / "train.jsonl"), split="train"),
        processing_class=tokenizer,
        callbacks=[Turns()],
        peft_config=adapters(setting) if setting.lora_rank else None,
    )
    model = trainer.model
    if setting.lora_rank:
        set_adapter(model, scale_b=0.0)
    single_turn = trainer._generate_single_turn

    def timed(prompt_ids: Any, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        done = single_turn(prompt_ids, *arguments, **named)
        seen["generate"] += time.perf_counter() - began
        seen["prompt_ids"] = prompt_ids
        return done

    trainer._generate_single_turn = timed

    def sample() -> Sample:
        """Sample one batch as a step does; return it with the loss and a file of its gradient."""
        from trl.trainer.utils import split_tensor_dict  # pyright: ignore[reportMissingImports]

        if setting.lora_rank:
            set_adapter(model, scale_b=COMPARED_SCALE)
        batch = next(iter(trainer.get_train_dataloader()))
        model.train()
        inputs = trainer._generate_and_score_completions(batch)
        loss = 0.0
        for part in split_tensor_dict(inputs, trainer.args.gradient_accumulation_steps):
            part_loss = trainer._compute_loss(model, part)
            part_loss.backward()
            loss += part_loss.item()
        save_gradients(model, folder / "gradients.safetensors")
        model.zero_grad(set_to_none=True)
        if setting.lora_rank:
            set_adapter(model, scale_b=0.0)
        responses = {key: seen[key] for key in ("prompt", "prompt_ids", "completion_ids", "rewards")}
        return responses | {"loss": loss, "gradients": str(folder / "gradients.safetensors")}

    def greedy() -> dict[str, float]:
        """Return the mean reward of greedy responses to the held-out prompts."""
        held_out = read_rows(folder / "validation.jsonl")
        rewards: list[float] = []
        for start in range(0, len(held_out), sequences):
            part = held_out[start : start + sequences]
            prompts = [row["prompt"] for row in part]
            inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
            inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
            with torch.no_grad():
                tokens = model.generate(**inputs, do_sample=False, max_new_tokens=setting.response_tokens)
            # the padding after the end token is a special token, too
            texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            rewards += scope["reward"](texts, answer=[row["answer"] for row in part])
        return {"accuracy": sum(rewards) / len(rewards), "rows": len(rewards)}

    packages = ("torch", "transformers", "trl", *(["peft"] if setting.lora_rank else []))
    reply({"versions": versions(*packages), **parameter_counts(model)})
    trainer.train()
    for request in incoming:
        reply(greedy() if request == "greedy" else memory())
