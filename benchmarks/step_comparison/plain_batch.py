"""A batch of random responses with its loss and gradient, from the definitions in plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from step_comparison.setting import (
    COMPARED_SCALE,
    Sample,
    Setting,
    adapters,
    read_rows,
    save_gradients,
    set_adapter,
)


def plain_sample(setting: Setting, folder: Path) -> Sample:
    """Return random responses with their fp32 loss and gradient, computed one sequence at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if setting.lora_rank:
        from peft import get_peft_model

        model = get_peft_model(model, adapters(setting))
        set_adapter(model, scale_b=COMPARED_SCALE)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    rows = read_rows(folder / "train.jsonl")[: setting.prompts]
    prompts = [row["prompt"] for row in rows for _ in range(setting.n)]
    prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    responses = torch.randint(len(tokenizer), (len(prompts), setting.response_tokens))
    rewards = torch.rand(setting.prompts, setting.n, dtype=torch.float64)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    loss = torch.zeros((), dtype=torch.float64)
    for ids, response, advantage in zip(prompt_ids, responses, advantages.flatten(), strict=True):
        sequence = torch.cat([torch.tensor(ids), response])
        logprobs = model(sequence[None]).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        ratio = (logprobs - logprobs.detach()).gather(-1, response[:, None]).exp().double()
        loss = loss - (advantage * ratio).sum() / responses.numel()
    loss.backward()
    file = folder / "gradients.safetensors"
    save_gradients(model, file)
    return {
        "prompt": prompts,
        "prompt_ids": prompt_ids,
        "completion_ids": responses.tolist(),
        "rewards": rewards.flatten().tolist(),
        "loss": loss.item(),
        "gradients": str(file),
    }
