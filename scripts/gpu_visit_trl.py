"""Time GRPO steps of TRL with transformers' `generate`, on the model and sizes of the item trl of gpu_visit_items.py.

    python -m gpu_visit_trl MODEL OUT TOKENS STEPS PROMPTS

OUT/seconds.txt gets the seconds of each step as it ends. Settings that decide the work are those of our side: 8
responses of TOKENS tokens to each prompt, none shorter; all parameters trained in fp32 with bf16 products, a reference
model, no activation checkpointing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SAMPLES, ROWS = 8, 32
"""Responses to a prompt, and sequences of one forward and backward pass."""


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return a reward that differs by response, as that of our side."""
    return [sum(map(ord, text)) % 11 / 10 for text in completions]


def main(arguments: Sequence[str]) -> int:
    """Train for some steps; return the exit code."""
    import torch
    import transformers
    import trl  # pyright: ignore[reportMissingImports]  (an optional package)
    from datasets import Dataset

    model, out = arguments[0], Path(arguments[1])
    tokens, steps, prompts = map(int, arguments[2:])
    accelerated = torch.accelerator.is_available()
    rows = min(ROWS, prompts * SAMPLES)

    class Clock(transformers.TrainerCallback):
        """Callback that times steps."""

        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if accelerated:
                torch.accelerator.synchronize()
            seconds = time.perf_counter() - self.began
            with (out / "seconds.txt").open("a") as file:
                file.write(f"{seconds}\n")
            print(f"step {seconds:.2f} s", flush=True)

    config = trl.GRPOConfig(
        output_dir=str(out / "trl"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=prompts * SAMPLES // rows,
        num_generations=SAMPLES,
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens},
        max_steps=steps,
        beta=0.001,
        learning_rate=1e-6,
        bf16=accelerated,
        use_cpu=not accelerated,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": f"sort: {i % 9999:04d}"} for i in range(2 * steps * prompts)]),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
        callbacks=[Clock()],
    )
    trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
