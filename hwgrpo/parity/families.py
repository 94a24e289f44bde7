"""Model families as tiny random models: what published architectures have that the built-in model lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hwgrpo.models.tiny import character_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0, **WINDOWS},
    "gemma3_text": WINDOWS,
    "qwen3_moe": EXPERTS,
    "qwen3_next": {
        **EXPERTS,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
"""`model_type` -> values of its configuration: tied embeddings, soft-caps, windows, experts, linear attention."""


def save_family(name: str, folder: Path) -> None:
    """Save a random model of a family, with a tokenizer of characters.

    Args:
        name: a key of `FAMILIES`.
        folder: receives the files.
    """
    tokenizer = character_tokenizer("")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(name, vocab_size=len(tokenizer), **SHAPE | ids | FAMILIES[name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():  # norms and biases start as ones and zeros, which would hide that they are left out
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
