"""Folders of tiny random vision-language models with heads that vLLM computes on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from hwgrpo.models.loading import resolve_model_path
from hwgrpo.models.tiny_vision import BEGIN, END_OF_IMAGE, IMAGE, VIDEO
from tests.support.models.vision_families import VISION_FAMILIES

BUILT_IN = "builtin://tiny?task=squares&head=32&hidden=64&layers=2&steps=20&batch=32"
"""Qwen2-VL's architecture."""
MARKS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END_OF_IMAGE,
}


def make_folder(name: str, folder: Path) -> str:
    """Return the folder of a model of a family of Qwen's, with the tokenizer and images of the built-in one."""
    built_in = resolve_model_path(BUILT_IN)
    tokenizer: Any = AutoTokenizer.from_pretrained(built_in)
    known = VISION_FAMILIES[name].config()
    fields = known.to_dict() | {field: tokenizer.get_vocab()[mark] for field, mark in MARKS.items()}
    text = fields["text_config"]
    text |= {"vocab_size": len(tokenizer), "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"head_dim": 32, "max_position_embeddings": 1024}
    # vLLM interleaves the axes of Qwen3-VL only where published configurations say so
    rope = {"mrope_section": [6, 5, 5], **({"mrope_interleaved": True} if name == "Qwen3-VL" else {})}
    text["rope_parameters"] |= rope
    fields["vision_config"]["out_hidden_size"] = 64
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(type(known).from_dict(fields), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, too
                parameter.add_(torch.randn_like(parameter) * 0.1)
    for part in (model, tokenizer, AutoImageProcessor.from_pretrained(built_in)):
        part.save_pretrained(folder)
    return str(folder)
