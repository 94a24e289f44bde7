"""First losses and gradients of TRL's GRPOTrainer on fixed completions: `python trl_worker.py TRL_FOLDER WORK_FOLDER`.

Reads WORK_FOLDER/cases.pt and writes WORK_FOLDER/found.pt: name -> loss, gradients, advantages, clip ratios.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(sys.argv[1])


def first_step(folder: Path, fixed: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the loss and the gradients of a trainer with some settings, up to the optimizer."""
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "reference")
    model.config._name_or_path = str(folder / "reference")  # from which the trainer loads its reference model
    samples = [*zip(fixed["prompt_index"].tolist(), fixed["completions"], fixed["rewards"].tolist(), strict=True)]
    functions = [lambda completions, i=i, **_: [parts[i] for *_, parts in samples] for i in range(2)]
    for i, function in enumerate(functions):
        function.__name__ = f"part_{i}"
    per_device = settings.pop("per_device_train_batch_size")
    uses_vllm = settings.pop("use_vllm", False)
    arguments = GRPOConfig(
        **settings,
        per_device_train_batch_size=per_device,
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        shuffle_dataset=False,
    )
    rows = [{"prompt": f"{i}"} for i in range(len(fixed["prompts"]))]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=functions,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.use_vllm = uses_vllm
    prompts = [fixed["prompts"][i] for i, *_ in samples]
    completions = [ids for _, ids, _ in samples]
    logprobs = fixed["rollout_logprobs"] if uses_vllm else None
    texts = [str(ids) for ids in completions]
    trainer._generate = lambda _: (prompts, completions, None, texts, logprobs, {}, None, None)
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([rows[i] for i, *_ in samples])
    if not uses_vllm:
        inputs["old_per_token_logps"] = fixed["old_logprobs"]
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    clips = {name: values[-1] for name, values in trainer._metrics["train"].items() if "clip_ratio" in name}
    return {"loss": float(loss), "gradients": gradients, "advantages": inputs["advantages"].clone(), "clips": clips}


def main() -> None:
    """Run every case."""
    warnings.filterwarnings("ignore")
    folder = Path(sys.argv[2])
    fixed, cases = torch.load(folder / "cases.pt", weights_only=False)
    torch.save({name: first_step(folder, fixed, dict(case)) for name, case in cases.items()}, folder / "found.pt")


if __name__ == "__main__":
    main()
