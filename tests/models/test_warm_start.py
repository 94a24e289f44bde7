"""What the warm start of the built-in model teaches; the models are those of other tests, from the cache of all."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hwgrpo.data.tasks import parse_task
from hwgrpo.models import builtin
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.values import Prompt, PromptBatch, Sampling


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_the_warm_started_model_has_the_skill_without_preferring_the_right_mode(seed):
    folder = builtin.resolve(f"builtin://tiny?task=sort&seed={seed}")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    task = parse_task("task://sort")
    prompts = [
        Prompt(str(i), row["prompt"], tuple(tokenizer(row["prompt"]).input_ids), row["ground_truth"], row)
        for i, row in enumerate(task.splits["validation"][:256])
    ]
    engine = LocalEngine(model, tokenizer, device=torch.device("cpu"), compute_dtype=torch.float32, max_sequences=1024)

    def shares(sampling: Sampling) -> tuple[float, float]:
        completions = engine.generate(PromptBatch(tuple(prompts)), sampling)
        answers = list(zip((prompts[i] for i in completions.prompt_index.tolist()), completions.texts))
        right = sum(text == prompt.ground_truth for prompt, text in answers)
        skilled = sum(
            text in {mode(task.payload(prompt.text)) for mode in task.modes.values()} for prompt, text in answers
        )
        return right / len(answers), skilled / len(answers)

    greedy, _ = shares(Sampling(1, 8, greedy=True))
    sampled, skilled = shares(Sampling(8, 8))
    assert greedy < 0.5
    assert 0.1 < sampled < 0.35
    assert skilled > 0.75
