"""Model families as tiny random models: what published architectures have that the built-in model lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_model
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.models.tiny_vision import image_processor, with_image_tokens
from hwgrpo.models.vision import ImageEncoder
from hwgrpo.training.vision_checks import check_vision

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
SURE = {
    "vocab_size": 16_389,
    "tie_word_embeddings": True,
    "embedding_multiplier": 10.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.4,
}
"""Rows that are longer than two blocks of any row kernel, and logits of which the last token's is far the largest: the
model is sure that a token repeats."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "granite": SURE,
    "gemma2": {"vocab_size": 8_197, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0, **WINDOWS},
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
"""`model_type` -> values of its configuration: tied embeddings, scaled logits of a large vocabulary, soft-caps of one
that fills a block and begins another, windows, experts, linear attention."""


VISION_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 16, "hidden_size": 32},
    "qwen3_vl": {
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 24,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}
"""`model_type` -> values of its tower's configuration: positions on three axes; features that join several layers."""
TOWER = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
MOST_PIXELS = 16 * 16
"""Of an image, which then has few tokens."""


def save_family(name: str, folder: Path) -> None:
    """Save a random model of a family, with a tokenizer of characters.

    Args:
        name: a key of `FAMILIES` or `VISION_FAMILIES`.
        folder: receives the files.
    """
    tokenizer = character_tokenizer("")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tower = VISION_FAMILIES.get(name)
    if tower is not None:
        tokenizer, marks = with_image_tokens(tokenizer)
        text = SHAPE | {"vocab_size": len(tokenizer), "rope_parameters": ROPE} | ids
        values = {"text_config": text, "vision_config": TOWER | tower, **marks}
        image_processor(MOST_PIXELS).save_pretrained(folder)
    else:
        values = SHAPE | {"vocab_size": len(tokenizer)} | ids | FAMILIES[name]
    config = AutoConfig.for_model(name, **values)
    kind = AutoModelForCausalLM if tower is None else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(config, dtype=torch.float32)
        with torch.no_grad():  # norms and biases start as ones and zeros, which would hide that they are left out
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def why_left_out(config: Config) -> str | None:
    """Return why a family that reads images cannot be compared with these settings; None: it can.

    Args:
        config: with the family's folder as `model.path`.
    """
    try:
        model = load_model(config.model, attention="eager", on_meta_device=True)
        check_vision(config, model.config)
        ImageEncoder(model)  # transformers may be too old for it
    except ConfigError as error:
        return str(error)
    return None
