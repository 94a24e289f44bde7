"""Small values for the tests of what is observed."""

import torch

from hwgrpo.values import Completions, Prompt, PromptBatch, Rewards

METRICS = {
    "reward": 0.532,
    "kl": 0.001,
    "actor/entropy": 0.7149,
    "response_length/mean": 5.0,
    "response_length/clip_ratio": 0.02,
    "actor/lr": 5e-4,
    "actor/grad_norm": 0.4213,
    "actor/pg_clipfrac": 0.013,
    "frac_reward_zero_std": 0.25,
    "perf/throughput": 12345.4,
    "perf/total_num_tokens": 2400.0,
    "timing_s/gen": 0.03,
    "timing_s/update_actor": 0.02,
    "timing_s/step": 0.0625,
}


def batch_of(sizes: list[int]) -> tuple[PromptBatch, Completions, Rewards, torch.Tensor]:
    """Return prompts, completions, rewards and advantages for groups of these sizes; sample i has i + 1 tokens."""
    prompts = tuple(
        Prompt(f"row{g}@0", f"prompt {g}", (1, 2), f"answer {g}", {}, source="task://sort") for g in range(len(sizes))
    )
    index = torch.tensor([g for g, size in enumerate(sizes) for _ in range(size)], dtype=torch.int64)
    count = len(index)
    lengths = torch.arange(1, count + 1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    completions = Completions(
        prompt_index=index,
        tokens=torch.zeros(total, dtype=torch.int64),
        offsets=offsets,
        logprobs=torch.zeros(total),
        finished=torch.arange(count) % 2 == 0,
        texts=tuple(f"response {i}" for i in range(count)),
    )
    score = torch.arange(count, dtype=torch.float64) / 8
    rewards = Rewards(score, torch.ones(count, dtype=torch.bool), {"exact_match": score})
    return PromptBatch(prompts), completions, rewards, torch.arange(count, dtype=torch.float32) - 1
