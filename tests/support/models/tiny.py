"""Tiny models and batches that tests make for themselves."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hwgrpo.config import Config, load_config
from hwgrpo.values import TrainBatch

VOCAB = 37


def tiny_qwen3(*, tied: bool = True, seed: int = 0, vocab: int = VOCAB) -> Qwen3ForCausalLM:
    """Return a random two-layer Qwen3 in fp32 with grouped-query attention."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    return sharpened(Qwen3ForCausalLM(config))


def tiny_llama(*, seed: int = 0) -> LlamaForCausalLM:
    """Return a random two-layer Llama in fp32 with an untied head."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
    )
    return sharpened(LlamaForCausalLM(config))


def sharpened(model):
    """Scale random weights up, so that logits are not all alike and mistakes show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return model


def settings(*overrides: str) -> Config:
    """Return a configuration for tests; nothing in it is loaded."""
    return load_config(
        None,
        [
            "model.path=unused",
            "data.train=task://sort",
            "reward.functions=[exact_match]",
            "data.max_prompt_tokens=16",
            "rollout.max_response_tokens=16",
            "trainer.prompts_per_step=4",
            *overrides,
        ],
    )


def ragged_batch(
    *,
    prompts: int = 4,
    n: int = 3,
    seed: int = 0,
    empty: bool = False,
    old: bool = False,
    ref: bool = False,
    alike: bool = False,
) -> TrainBatch:
    """Return a batch of prompts and responses of unequal lengths with random tokens and advantages.

    Responses are of two different tokens if they are to begin `alike`.
    """
    g = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.randint(2, 7, (prompts,), generator=g)
    lengths = torch.randint(1, 8, (prompts * n,), generator=g)
    if empty:
        lengths[1::4] = 0
    total = int(lengths.sum())

    def offsets(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values.new_zeros(1), values.cumsum(0)])

    rollout = torch.randn(total, generator=g) * 0.2 - 3.0
    return TrainBatch(
        prompt_tokens=torch.randint(VOCAB, (int(prompt_lengths.sum()),), generator=g),
        prompt_offsets=offsets(prompt_lengths),
        prompt_index=torch.arange(prompts).repeat_interleave(n),
        tokens=torch.randint(2 if alike else VOCAB, (total,), generator=g),
        offsets=offsets(lengths),
        advantages=torch.randn(prompts * n, generator=g),
        logprobs=rollout,
        old_logprobs=rollout + 0.3 * torch.randn(total, generator=g) if old else None,
        ref_logprobs=rollout + 0.3 * torch.randn(total, generator=g) if ref else None,
    )
